"""Two checks of the study `speedrun`: another library's BERT on its batches, and CPU-seconds.

    python -m benchmarks.speedrun peer STUDY_OUT --run 'B0+budget=whole/seed-2' ...
    python -m benchmarks.speedrun cost STUDY_OUT --arm B1 --arm B0 --arm best [--rounds 5]

STUDY_OUT is the folder of the study's runs; `--study FILE` is for another study.

`peer` trains Hugging Face's BertForMaskedLM of a finished run's size: its own initialisation and
defaults (dropout 0.1, GELU, LayerNorm with eps 1e-12, SDPA), torch.optim.AdamW with betas, eps,
decay, clip and rate of the run, fp32 weights under bf16 autocast where the run is in bf16. Our
loader makes the run's batches again; their hashes, masks included, must be those of batches.tsv. As
in the library's run_mlm.py attention is over the whole row, across the borders of its documents,
and positions count through it; padding alone is masked. Then both models are read in fp32 on the
text and masks of the study's `reads`. STUDY_OUT/peer/RUN.json keeps a peer, which is not trained
again; STUDY_OUT/peer.json has all. `--steps N` tries the first N steps: RUN-N-steps.json.

`cost` measures user and system CPU-seconds of a step of arms: loader, passes and update, without
start-up, logging, evaluation and saves. In each round every arm, by the first run that the study
has of it, is a process of its own with OMP_NUM_THREADS=1 and data.workers=0; another arm begins
each round. `ratio` is the median over the rounds of an arm's CPU-seconds over those of the first
--arm; FLOPs are those of `postnorm plan`, with the optimizer's. STUDY_OUT/cost.json has all rounds.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.machine import versions, write_json
from benchmarks.step_subjects import IGNORED, ROOT, Ours, hugging_face, labels_of
from experiments.probes import masked_sums, trained_model
from experiments.read import config_of_read, outcome, runs_folder
from experiments.study import PRESETS, StudyPlan, known_name, plan, read_study, run_plan
from pipeline.config.load import build, load
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import read_index
from pipeline.data.loader import MicroBatch, TrainLoader
from pipeline.data.record import read_batches
from pipeline.data.run_order import DataRank
from pipeline.errors import ConfigError, DataError, PostnormError
from pipeline.objectives.base import Sum, Sums, weight_tensor
from pipeline.objectives.choose import make_objective
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime import env
from pipeline.runtime.cli import at_least
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import table
from pipeline.train.optimizers.table import parameter_groups
from pipeline.train.pretraining import with_vocabulary

_WARM_UP = 3
"""Steps before the measured ones: memory is taken, and numba's code loaded."""
_ATTENTION = "over whole rows, across the borders of documents, as in run_mlm.py; not to padding"


class WholeRows(MaskedLanguageModeling):
    """The sums of `MaskedLanguageModeling` from a peer, which sees whole rows."""

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Sums:
        """Return the sums over the masked positions of a micro-batch."""
        logits = model(batch.input_ids, attention_mask=(batch.documents > 0).long()).logits
        masked = logits.flatten(0, 1)[batch.inputs["masked_index"]].float()
        loss = F.cross_entropy(masked, batch.inputs["targets"], reduction="sum")
        correct = (masked.argmax(-1) == batch.inputs["targets"]).sum().float()
        count = weight_tensor(batch.weights["loss"], loss)
        return {"loss": Sum(loss, count), "accuracy": Sum(correct, count)}


def finished_run(out: Path, name: str) -> PretrainConfig:
    """Read the config of a finished run (ConfigError: there is none, or no peer can follow it)."""
    runs = runs_folder(out)
    folders = sorted(path.parent for path in runs.glob("*/*/config.yaml"))
    finished = [str(f.relative_to(runs)) for f in folders if outcome(f) == "finished"]
    known_name(f"finished runs of {runs}", finished, name, "--run")
    config = load(PretrainConfig, runs / name / "config.yaml").config
    if config.timeline.has_stages or config.objective.kind != "mlm":
        raise ConfigError(f"--run {name} has stages or objective.kind={config.objective.kind}; "
                          "choose a run without stages of objective.kind=mlm")  # fmt: skip
    return with_vocabulary(config, read_index(config.data.dir))


def steps_of(config: PretrainConfig) -> Iterator[list[MicroBatch]]:
    """Make the micro-batches of a run's steps, skipped ones included, without end."""
    index = read_index(config.data.dir)
    inputs = make_objective(config.objective).train_inputs(config.train_data, index)
    return TrainLoader(index, config.train_data, inputs, DataRank(0, 1)).steps_from(0)


def batches_of(run: Path, config: PretrainConfig, steps: int) -> Iterator[list[MicroBatch]]:
    """Make those of a finished run's first steps again (DataError: the run saw another one)."""
    for record, batches in zip(read_batches(run), steps_of(config), strict=False):
        if record.step is not None and record.step > steps:
            return
        found = sum(batch.hash for batch in batches) % 2**64
        if found != record.hash:
            raise DataError(
                f"{RunFolder(run).batches}, batch {record.batch}: hash {record.hash:016x}, and "
                f"{config.data.dir} now gives {found:016x}: the dataset or config.yaml changed "
                "since; restore it, or train the run again"
            )
        if record.step is not None:
            yield batches


def make_peer(config: PretrainConfig) -> nn.Module:
    """Make the peer of a run, from the run's seed."""
    torch.manual_seed(config.seed)
    longest, pad = max(config.batches.seq_lens), read_index(config.data.dir).vocabulary.pad
    model, _ = hugging_face("bert", config.model, max_position_embeddings=longest, pad_token_id=pad)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def train_peer(model: nn.Module, run: Path, config: PretrainConfig, steps: int) -> int:
    """Train a peer on the batches of a run's first steps; return how many tokens were masked."""
    device, of, masked = next(model.parameters()).device, config.train, 0
    groups, betas = parameter_groups(model, of.weight_decay), (of.adam_beta1, of.adam_beta2)
    optimizer = torch.optim.AdamW(groups, lr=of.lr, betas=betas, eps=of.adam_eps)
    model.train()
    for step, batches in enumerate(batches_of(run, config, steps)):
        for group in optimizer.param_groups:
            group["lr"] = config.timeline.learning_rate(step, 0)
        whole = sum(batch.weights["loss"] for batch in batches)
        for batch in (each.to(device) for each in batches):
            labels, shown = labels_of(batch), (batch.documents > 0).long()
            count = int((labels != IGNORED).sum())
            assert count == batch.weights["loss"], "as many as the run predicts"
            with torch.autocast(device.type, torch.bfloat16, enabled=of.precision == "bf16"):
                mean = model(batch.input_ids, attention_mask=shown, labels=labels).loss
            if count:  # a mean over nothing is NaN
                (mean * (count / whole)).backward()
                masked += count
        nn.utils.clip_grad_norm_(model.parameters(), of.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            sys.stderr.write(f"{run}: step {step + 1} of {steps}, loss {mean.item():.4f}\n")
    return masked


def peers(out: Path, study: str, names: Sequence[str], most: float = math.inf) -> dict[str, Any]:
    """Train the peers of finished runs that are missing; return what is known of each name."""
    configs = {name: finished_run(out, name) for name in names}
    reads, found = {name: asdict(of) for name, of in read_study(study)[1].reads.items()}, {}
    for name, config in configs.items():
        run, steps = runs_folder(out) / name, int(min(most, config.train.num_steps))
        is_whole = steps == config.train.num_steps
        path = out / "peer" / f"{name}{'' if is_whole else f'-{steps}-steps'}.json"
        done = json.loads(RunFolder(run).done.read_bytes())
        settings = {"is_whole": is_whole, "done": done, "reads": reads}
        found[name] = json.loads(path.read_bytes()) if path.is_file() else {}
        if found[name].get("settings") != settings:
            found[name] = {"run": name, "settings": settings, **_read(run, config, steps, reads)}
            write_json(path, found[name])
    every = [json.loads(path.read_bytes()) for path in sorted((out / "peer").glob("*/*.json"))]
    whole = {each["run"]: each for each in every if each["settings"]["is_whole"]}
    if whole:
        write_json(out / "peer.json", {"versions": versions(), "runs": whole})
    return found


def _read(run: Path, config: PretrainConfig, steps: int, reads: dict[str, Any]) -> dict[str, Any]:
    """Train a peer of a run, and read both on held-out text."""
    model, used = make_peer(config), cpu_s()
    masked, used = train_peer(model, run, config, steps), cpu_s() - used
    of_ours = trained_model(run), make_objective(config.objective)
    both, held_out = {"ours": of_ours, "peer": (model, WholeRows())}, {}
    for name, of in reads.items():
        read, values = config_of_read(config, name, of), dict[str, dict[str, float]]()
        for who, each in both.items():
            sums = masked_sums(*each, read, of["source"])
            values[who] = {metric: total / count for metric, (total, count) in sums.items()}
            values[who]["masked"] = sums["loss"][1]
        assert values["ours"]["masked"] == values["peer"]["masked"], "the same masks"
        held_out[name] = values
    return {
        "model": type(model).__name__, "attention": _ATTENTION, "steps": steps, "cpu_s": used,
        "train": asdict(config.train), "masked": masked, "held_out": held_out,
        "parameters": {who: sum(p.numel() for p in m.parameters()) for who, (m, _) in both.items()},
        "threads": torch.get_num_threads(), "versions": versions(),
    }  # fmt: skip


def cpu_s() -> float:
    """Return user and system CPU-seconds of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def cost(
    made: StudyPlan, arms: list[str], rounds: int, measure: Callable[[PretrainConfig], float]
) -> dict[str, dict[str, Any]]:
    """Compare arms with the first of them; `measure` gives the CPU-seconds of a run's step."""
    first = {cell.arm: next(iter(of.values())) for cell, of in reversed(made.of_cells.items())}
    for arm in arms:
        known_name(f"arms with runs in {made.name}", sorted(first), arm, "--arm")
    runs = {arm: made.runs[first[arm]] for arm in arms}
    flops = {a: (p := run_plan(r.config, made.preset)).flops / p.steps for a, r in runs.items()}
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(rounds):
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            seconds[arm].append(measure(runs[arm].config))
            sys.stderr.write(f"round {turn + 1}, {arm}: {seconds[arm][-1]:.4f} CPU-s a step\n")
    found = {}
    for arm, of in seconds.items():
        ratios = [x / y for x, y in zip(of, seconds[arms[0]], strict=True)]
        found[arm] = {"run": runs[arm].name, "cpu_s": of, "ratios": ratios,
                      "ratio": statistics.median(ratios), "flops": flops[arm],
                      "flops_ratio": flops[arm] / flops[arms[0]]}  # fmt: skip
    return found


def in_a_process(config: PretrainConfig, steps: int) -> float:
    """Return the CPU-seconds of a step of a run, measured by `worker` in a process of its own."""
    config = with_vocabulary(config, read_index(config.data.dir))
    # Not the loader's processes: children count only when they have ended.
    data = replace(config.data, dir=str(Path(config.data.dir).resolve()), workers=0)
    done = subprocess.run(
        [sys.executable, "-c", f"import benchmarks.speedrun as s; s.worker({steps})"], cwd=ROOT,
        input=json.dumps(asdict(replace(config, data=data))), capture_output=True, text=True,
        env=env.child_environment(OMP_NUM_THREADS="1"), check=False,
    )  # fmt: skip
    if done.returncode:
        raise DataError(f"steps of {config.run_dir} ended badly:\n{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def worker(steps: int) -> None:
    """Train some steps of the run whose config is the input; print the CPU-seconds of one."""
    config = build(PretrainConfig, json.loads(sys.stdin.read()), "the arm")
    env.process_info_or_alone()
    ours, made, before = Ours(config), steps_of(config), 0.0
    for step in range(_WARM_UP + steps):
        before = cpu_s() if step == _WARM_UP else before
        ours.engine.train_step(next(made), ours.objective, config.timeline.learning_rate(step, 0))
    sys.stdout.write(f"\n{(cpu_s() - before) / steps!r}\n")


def _peer(arguments: argparse.Namespace, out: Path) -> Iterator[list[str]]:
    yield ["run", "steps", "read", "loss", "of the peer", "accuracy", "of the peer"]
    for name, each in peers(out, arguments.study, arguments.run, arguments.steps).items():
        for read, of in each["held_out"].items():
            values = [f"{of[who][m]:.4f}" for m in ("loss", "accuracy") for who in ("ours", "peer")]
            yield [name, str(each["steps"]), read, *values]


def _cost(arguments: argparse.Namespace, out: Path) -> Iterator[list[str]]:
    name, study = read_study(arguments.study)
    made = plan(name, study, arguments.preset, out=out, overrides=arguments.set)
    arms, steps = list(dict.fromkeys(arguments.arm)), arguments.steps
    found = cost(made, arms, arguments.rounds, lambda config: in_a_process(config, steps))
    about = {"study": name, "preset": made.preset, "overrides": arguments.set, "steps": steps,
             "warm_up_steps": _WARM_UP, "cpus": os.cpu_count(), "versions": versions()}  # fmt: skip
    write_json(out / "cost.json", about | {"arms": found})
    yield ["arm", "CPU-s a step", "ratio", "least", "most", "FLOP a step", "ratio"]
    for arm, of in found.items():
        ratios = [f"{x:.3f}" for x in (of["ratio"], min(of["ratios"]), max(of["ratios"]))]
        middle = f"{statistics.median(of['cpu_s']):.4f}"
        yield [arm, middle, *ratios, f"{of['flops']:.3e}", f"{of['flops_ratio']:.3f}"]


def main() -> None:
    """Run a part; print its table."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parts = parser.add_subparsers(dest="part", required=True)
    peer, arms = parts.add_parser("peer"), parts.add_parser("cost")
    for each, run in ((peer, _peer), (arms, _cost)):
        each.set_defaults(run_part=run)
        each.add_argument("out", type=Path, metavar="STUDY_OUT", help="folder of the study's runs")
        each.add_argument("--study", default="speedrun", help="its name or file")
    peer.add_argument("--run", action="append", required=True, help="below STUDY_OUT/runs")
    peer.add_argument("--steps", type=at_least(0), default=math.inf, help="for trying out")
    arms.add_argument("--arm", action="append", required=True, help="ratios are over the first")
    arms.add_argument("--rounds", type=at_least(1), default=5)
    arms.add_argument("--steps", type=at_least(1), default=40, help="measured ones of a round")
    arms.add_argument("--preset", choices=PRESETS, default="small")
    arms.add_argument("--set", action="append", default=[], help="section.key=value of all runs")
    arguments = parser.parse_args()
    try:
        rows = list(arguments.run_part(arguments, arguments.out.resolve()))
    except PostnormError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    sys.stdout.write("".join(f"{line}\n" for line in table(rows, right=range(1, 7))))


if __name__ == "__main__":
    main()
