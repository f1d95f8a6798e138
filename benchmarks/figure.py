"""The figure of README.md: 24 layers of Post-LN with and without what makes them converge.

    python -m benchmarks.figure [--study FOLDER]

Draws `docs/figures/post_ln.svg` from `experiments/results/post_ln.json`. With `--study`, the
`--out` of `postnorm study deep_start`, first takes the curves of its first seed from there.
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
    "branches as large as x (init: unit), stuck": "no_carry+alpha=alpha_0_",
    "the same with the alpha warm-up": "no_carry+start=unit_alpha_50_+rate=lr_x1",
    "roformer_v2 (branches times N^-1/2)": "no_carry+start=rsqrt_depth+rate=lr_x1",
    "realformer_v2 (DeepNorm, mean of carried scores)": "mean+start=deepnorm+rate=lr_x1",
}


def run_of(label: str) -> str:
    """Name the run of a curve, its first seed."""
    return f"{_RUNS[label]}/seed-1"


def collect(out: Path) -> dict[str, Any]:
    """Take what the figure needs from the runs of the study."""
    found: dict[str, Any] = {"held_out_loss": {}, "curves": {}}
    for label in _RUNS:
        records = read_json_lines(RunFolder(runs_folder(out) / run_of(label)).metrics)
        last = [record for record in records if record["kind"] == "eval"][-1]
        found["unigram_entropy"] = last["unigram_entropy"]
        found["held_out_loss"][label] = last["loss"]
        train = [record for record in records if record["kind"] == "train"]
        found["curves"][label] = [[each["step"], round(each["loss"], 4)] for each in train]
    return found


def figure(data: dict[str, Any]) -> str:
    """Draw the curves as SVG."""
    entropy = data["unigram_entropy"]
    lines = [Line(label, points) for label, points in data["curves"].items()]
    steps = max(line.points[-1][0] for line in lines)
    # A line like the others: its name stands in the legend, where no curve crosses it.
    lines.append(Line("unigram entropy", [(0, entropy), (steps, entropy)]))
    return draw(
        [Panel("24 layers of Post-LN, width 48, one seed", lines, x_name="updates")],
        y_name="training loss, nats",
        dotted={},
        top=entropy + _SHOWN_NATS,
    )


def main() -> None:
    """Update the data if asked to, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", type=Path, help="--out of `postnorm study deep_start`")
    arguments = parser.parse_args()
    if arguments.study:
        DATA.write_text(json.dumps(collect(arguments.study)) + "\n")
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_text(figure(json.loads(DATA.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
