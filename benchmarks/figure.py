"""The figure of README.md: starts of 24 layers of Post-LN, each at its own best rate.

    python -m benchmarks.figure [--study FOLDER]

Draws `docs/figures/post_ln.svg` from `experiments/results/post_ln.json`. With `--study`, the
`--out` of `postnorm study starts`, first takes the curves of all seeds from there.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from experiments.read import runs_folder
from pipeline.inspect.curves import Line, Panel, draw
from pipeline.runtime.files import read_json_lines
from pipeline.runtime.run_folder import RunFolder

_ROOT = Path(__file__).parents[1]
DATA = _ROOT / "experiments" / "results" / "post_ln.json"
FIGURE = _ROOT / "docs" / "figures" / "post_ln.svg"
_SHOWN_NATS = 0.4
"""Curves begin this much above the unigram entropy."""
_RUNS = {
    "branches as large as x, lr 5e-4": "unit+layers=24_layers",
    "the same, alpha warm-up, lr 2e-3": "alpha_50_+layers=24_layers",
    "BERT's start, lr 4e-3": "BERT_s+layers=24_layers+rate=lr_4e-3",
    "branches times N^-1/2, lr 4e-3": "N_-1_2_+layers=24_layers+rate=lr_4e-3",
    "ReZero, lr 8e-3": "ReZero+layers=24_layers+rate=lr_8e-3",
    "DeepNorm, lr 8e-3": "DeepNorm+layers=24_layers+rate=lr_8e-3",
}
_SEEDS = ("seed-2", "seed-3", "seed-4")


def run_of(label: str, seed: str) -> str:
    """Name the run of a curve."""
    return f"{_RUNS[label]}/{seed}"


def collect(out: Path) -> dict[str, Any]:
    """Take what the figure needs from the runs of the study."""
    found: dict[str, Any] = {"held_out_loss": {}, "curves": {}}
    for label in _RUNS:
        held_out: dict[str, float] = {}
        curves: dict[str, list[list[float]]] = {}
        found["held_out_loss"][label], found["curves"][label] = held_out, curves
        for seed in _SEEDS:
            records = read_json_lines(RunFolder(runs_folder(out) / run_of(label, seed)).metrics)
            last = [record for record in records if record["kind"] == "eval"][-1]
            found["unigram_entropy"] = last["unigram_entropy"]
            held_out[seed] = last["loss"]
            train = [record for record in records if record["kind"] == "train"]
            curves[seed] = [[each["step"], round(each["loss"], 4)] for each in train]
    return found


def figure(data: dict[str, Any]) -> str:
    """Draw the curves as SVG, one line for each seed."""
    entropy = data["unigram_entropy"]
    lines = [
        Line(label, points) for label, seeds in data["curves"].items() for points in seeds.values()
    ]
    steps = max(line.points[-1][0] for line in lines)
    # A line like the others: its name stands in the legend, where no curve crosses it.
    lines.append(Line("unigram entropy", [(0, entropy), (steps, entropy)]))
    return draw(
        [Panel("24 layers of Post-LN, width 48, three seeds each", lines, x_name="updates")],
        y_name="training loss, nats",
        dotted={},
        top=entropy + _SHOWN_NATS,
    )


def main() -> None:
    """Update the data if asked to, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", type=Path, help="--out of `postnorm study starts`")
    arguments = parser.parse_args()
    if arguments.study:
        DATA.write_text(json.dumps(collect(arguments.study)) + "\n")
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_text(figure(json.loads(DATA.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
