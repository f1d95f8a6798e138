"""Deep Post-LN from scratch: what lets it converge, without and with carried attention scores.

    python -m studies.stability OUT [--only '24x48 alpha*'] [--seeds 3] [--jobs 2]
        [--dataset DATASET] [--table studies/results/stability.md]

Example, all of the published table, 144 trials and 2.4 CPU hours:

    python -m studies.stability runs/stability --table studies/results/stability.md

A trial is one arm with one seed: a narrow model, trained from scratch for some hundred updates in a
process with one thread, and then evaluated on held-out text. Arms are `SIZE METHOD CARRY`; the
methods keep a deep model trainable, the carries are forms of RealFormer's score residual. Seeds
decide initialisation, order and masks: trials of one seed see the same text with the same masks.

A finished trial lies in OUT/trials and is not trained again, so that the command can be stopped
at any time and called again; `--seeds 0` trains nothing and reports. The text is the embedded
corpus of `configs/prep/demo.yaml`, prepared once into OUT/data, or a folder of `python -m data_prep
run`. `--quick` has two layers and takes seconds: a check of this program, not a result.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from studies.carry_forms import FORMS
from studies.run import embedded_corpus
from studies.stability_report import Finished, curves, summary, table
from studies.stability_trial import Trial

ROOT = Path(__file__).parents[1]
_STEPS = 400
CARRIES = ("none", "mean", "sum")


@dataclass(frozen=True)
class Size:
    """Of the model and of its training."""

    layers: int
    width: int
    steps: int
    heads: int = 2
    seq_len: int = 64
    batch: int = 16
    lr: float = 3e-3
    mask_prob: float = 0.3
    eval_sequences: int = 512

    @property
    def name(self) -> str:
        """Layers, width, and updates where they are not the usual number."""
        updates = "" if self.steps == _STEPS else f" {self.steps} updates"
        return f"{self.layers}x{self.width}{updates}"


def methods(size: Size) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Fields of the model and of training, by name. All but `pre` are Post-LN."""
    warm_ups: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        f"alpha {percent}%": ({}, {"alpha_warmup_steps": size.steps * percent // 100})
        for percent in (25, 50, 75)
    }
    deepnorm = {"residual": "deepnorm", "init": "deepnorm"}
    return {
        "plain": ({}, {}),
        **warm_ups,
        "deepnorm": (deepnorm, {}),
        "rezero": ({"residual": "rezero"}, {}),
        "rsqrt_depth": ({"init": "rsqrt_depth"}, {}),
        "rsqrt_depth, alpha 50%": ({"init": "rsqrt_depth"}, warm_ups["alpha 50%"][1]),
        "deepnorm, alpha 50%": (deepnorm, warm_ups["alpha 50%"][1]),
        "pre": ({"norm_placement": "pre"}, {}),
    }


@dataclass(frozen=True)
class Arm:
    """What is compared."""

    size: Size
    method: str
    carry: str

    @property
    def name(self) -> str:
        """`SIZE METHOD CARRY`."""
        return f"{self.size.name} {self.method} {self.carry}"

    def trial(self, seed: int) -> Trial:
        """Everything said."""
        size = self.size
        of_model, of_train = methods(size)[self.method]
        model = {
            "num_layers": size.layers, "hidden_size": size.width, "num_heads": size.heads,
            "ffn_size": 4 * size.width, "init": "unit", **of_model,
        }  # fmt: skip
        train = {
            "num_steps": size.steps, "warmup_steps": size.steps // 8, "lr": size.lr,
            "global_batch": size.batch, "micro_batch": size.batch, **of_train,
        }  # fmt: skip
        data = {"seq_len": size.seq_len, "mask_prob": size.mask_prob}
        return Trial(self.carry, model, train, data, size.eval_sequences, seed)


def arms() -> Iterator[tuple[Arm, int]]:
    """Arms and how many seeds each has, what matters most first."""
    deep = Size(24, 48, _STEPS)
    first = ("rsqrt_depth", "alpha 50%", "plain", "deepnorm")
    for method in first:
        for carry in CARRIES:
            yield Arm(deep, method, carry), 3
    yield Arm(deep, "rsqrt_depth, alpha 50%", "alpha alone"), 3
    for form in FORMS:
        if not FORMS[form].warmed:
            yield Arm(deep, "rsqrt_depth", form), 1
        if FORMS[form].branches_warmed:
            yield Arm(deep, "alpha 50%", form), 1
    for method in methods(deep):
        if method not in first:
            for carry in CARRIES:
                yield Arm(deep, method, carry), 1
    for method in ("rsqrt_depth", "alpha 50%", "deepnorm"):
        for carry in CARRIES:
            yield Arm(Size(24, 48, 3 * _STEPS), method, carry), 1
    for layers in (12, 6, 4):
        size = Size(layers, 48, _STEPS)
        for method in ("rsqrt_depth", "deepnorm"):
            for carry in CARRIES:
                yield Arm(size, method, carry), 3
        yield Arm(size, "rsqrt_depth, alpha 50%", "alpha alone"), 3


def _quick() -> Iterator[tuple[Arm, int]]:
    size = Size(2, 16, 8, batch=4, seq_len=32, eval_sequences=8)
    for method in ("plain", "alpha 50%"):
        for carry in ("none", "sum"):
            yield Arm(size, method, carry), 1


def trial_file(folder: Path, arm: Arm, seed: int) -> Path:
    """Where a finished trial lies."""
    return folder / "trials" / f"{arm.name.replace(' ', '_')}_{seed}.json"


def _kept(file: Path, trial: Trial) -> dict[str, Any] | None:
    """What was found earlier."""
    if not file.exists():
        return None
    kept = json.loads(file.read_text())
    if kept["trial"] != asdict(trial):
        raise SystemExit(
            f"{file} is of a trial with other settings than this version has; "
            "move it away, or choose another OUT"
        )
    found: dict[str, Any] = kept["found"]
    return found


def _train(file: Path, trial: Trial, dataset: Path) -> None:
    """Trains in a process of its own; the file appears when all is done."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as spec:
        json.dump(asdict(trial), spec)
        spec.flush()
        command = [sys.executable, "-m", "studies.stability_trial", str(dataset), spec.name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{file.stem}: {done.stderr.strip()}")
    found = json.loads(done.stdout.splitlines()[-1])
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps({"trial": asdict(trial), "found": found}) + "\n")
    os.replace(unfinished, file)
    sys.stderr.write(
        f"{file.stem}: held-out loss {found['eval_loss']:.3f}, {found['cpu_s']:.0f} CPU s\n"
    )


def study(
    folder: Path,
    dataset: Path,
    wanted: Sequence[tuple[Arm, int]],
    *,
    jobs: int,
    only: str = "*",
    seeds: int = 3,
) -> list[Finished]:
    """Trains what is wanted and not there yet; returns all finished trials of the arms.

    Args:
        folder: for the trials.
        dataset: folder of data_prep.
        wanted: arms, each with its number of seeds.
        jobs: trials at a time.
        only: arms that are trained, as a shell pattern.
        seeds: at most so many are trained.
    """
    (folder / "trials").mkdir(parents=True, exist_ok=True)
    # Seed by seed: every arm has a first result before any has a second.
    trials = sorted(
        ((arm, seed) for arm, number in wanted for seed in range(1, number + 1)),
        key=lambda trial: trial[1],
    )  # fmt: skip
    with ThreadPoolExecutor(jobs) as pool:
        started = [
            pool.submit(_train, trial_file(folder, arm, seed), arm.trial(seed), dataset.resolve())
            for arm, seed in trials
            if seed <= seeds and fnmatch(arm.name, only)
            and not _kept(trial_file(folder, arm, seed), arm.trial(seed))
        ]  # fmt: skip
        for each in started:
            each.result()
    return [
        Finished(arm.size.name, arm.method, arm.carry, seed, found)
        for arm, seed in trials
        if (found := _kept(trial_file(folder, arm, seed), arm.trial(seed)))
    ]


def _write(arguments: argparse.Namespace, trials: list[Finished], result: dict[str, Any]) -> None:
    """The table, and beside it one picture for each size."""
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    file: Path = arguments.table
    pictures = []
    for size in dict.fromkeys(trial.size for trial in trials):
        picture = file.with_name(f"{file.stem}-{size.replace(' ', '-')}.svg")
        picture.write_text(curves(trials, size), encoding="utf-8")
        pictures.append(f"![{size}]({picture.name})")
    heading = (
        f"`python -m studies.stability OUT --table ...`; {versions}. What is compared is said "
        "in `studies/stability.py` and `studies/carry_forms.py`. "
        f"{result['trials']} of {result['trials_wanted']} trials are done; an empty cell has none, "
        "one without a number of seeds has one.\n\n" + "\n".join(pictures)
    )
    file.write_text(table(trials, heading), encoding="utf-8")


def main() -> None:
    """Trains what is missing, reports, and prints a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for data and trials; continued if it exists")
    parser.add_argument("--dataset", type=Path, help="folder of data_prep; default: OUT/data")
    parser.add_argument("--only", default="*", help="arms to train, as a shell pattern")
    parser.add_argument("--seeds", type=int, default=3, help="at most so many of each arm; 0: none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trials at a time")
    parser.add_argument("--quick", action="store_true", help="two layers, a few updates")
    parser.add_argument("--table", type=Path, help="Markdown file; pictures are put beside it")
    arguments = parser.parse_args()
    wanted = list(_quick() if arguments.quick else arms())
    dataset = arguments.dataset or embedded_corpus(arguments.out)
    trials = study(
        arguments.out, dataset, wanted,
        jobs=arguments.jobs, only=arguments.only, seeds=arguments.seeds,
    )  # fmt: skip
    result = {
        "trials": len(trials), "trials_wanted": sum(number for _, number in wanted),
        "held_out_loss": summary(trials),
        "versions": {
            "python": platform.python_version(), "machine": platform.machine(),
            **(trials[0].found["versions"] if trials else {}),
        },
    }  # fmt: skip
    if arguments.table and trials:
        _write(arguments, trials, result)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
