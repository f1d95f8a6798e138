"""The figure of README.md: 24 layers of Post-LN with and without what makes them converge.

    python -m studies.figure [--trials FOLDER]

Draws `docs/figures/post_ln.svg` from `studies/results/post_ln.json`. With `--trials`, a folder of
`python -m studies.stability`, first takes the curves from there:

    python -m studies.stability FOLDER --seeds 1 --only '24x48 *'
"""

import argparse
import json
from pathlib import Path
from typing import Any

from pipeline.inspect.curves import Line, Panel, draw
from studies.stability import ROOT, Arm, Size, trial_file

DATA = ROOT / "studies" / "results" / "post_ln.json"
FIGURE = ROOT / "docs" / "figures" / "post_ln.svg"
_SHOWN_NATS = 0.4
"""Curves begin this much above the unigram entropy."""
_DEEP = Size(24, 48, 400)
_ARMS = {
    "branches as large as x (init: unit), stuck": Arm(_DEEP, "plain", "none"),
    "the same with the alpha warm-up": Arm(_DEEP, "alpha 50%", "none"),
    "roformer_v2 (branches times N^-1/2)": Arm(_DEEP, "rsqrt_depth", "none"),
    "realformer_v2 (DeepNorm, mean of carried scores)": Arm(_DEEP, "deepnorm", "mean"),
}


def collect(folder: Path) -> dict[str, Any]:
    """Take what the figure needs from finished trials."""
    found = {
        label: json.loads(trial_file(folder, arm, 1).read_text())["found"]
        for label, arm in _ARMS.items()
    }
    first = next(iter(found.values()))
    return {
        "versions": first["versions"],
        "unigram_entropy": first["unigram_entropy"],
        "held_out_loss": {label: round(one["eval_loss"], 4) for label, one in found.items()},
        "curves": {
            label: [[step, round(loss, 4)] for step, loss in one["curve"]]
            for label, one in found.items()
        },
    }


def figure(data: dict[str, Any]) -> str:
    """Draw the curves as SVG."""
    entropy = data["unigram_entropy"]
    lines = [Line(label, points) for label, points in data["curves"].items()]
    # A line like the others: its name stands in the legend, where no curve crosses it.
    lines.append(Line("unigram entropy", [(0, entropy), (_DEEP.steps, entropy)]))
    return draw(
        [Panel("24 layers of Post-LN, width 48", lines, x_name="updates")],
        y_name="training loss, nats",
        dotted={},
        top=entropy + _SHOWN_NATS,
    )


def main() -> None:
    """Update the data if asked to, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=Path, help="folder of studies.stability")
    arguments = parser.parse_args()
    if arguments.trials:
        DATA.write_text(json.dumps(collect(arguments.trials)) + "\n")
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_text(figure(json.loads(DATA.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
