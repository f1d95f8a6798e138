"""The GPU results as Markdown; says plainly what was not measured.

    python -m benchmarks.gpu_report FOLDER [--table benchmarks/results/gpu.md] [--revision 2d9f7724]

FOLDER has what `benchmarks/run_gpu.sh` and `benchmarks/train_gpu.sh` left, a JSON file a part. What
is not there was not measured.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.goals import TILES, Results, judge

PARTS = ("checks", "attention", "steps", "few", "profile", "training")
_COMMAND = """\
```
make gpu-kit                          # where there is a network: gpu-kit/, 37 MiB
benchmarks/run_gpu.sh gpu-kit         # on the GPU machine, below 9 minutes: all but training
benchmarks/train_gpu.sh gpu-kit       # a real training run of 6 minutes
```"""


def read_results(folder: Path) -> Results:
    """The parts that are there."""
    found = {}
    for part in PARTS:
        path = folder / f"{part}.json"
        if path.exists():
            found[part] = json.loads(path.read_text(encoding="utf-8"))
    return found


def report(results: Results, revision: str = "") -> str:
    """The whole page."""
    measured = [part for part in PARTS if part in results]
    lines = ["# Speed on one GPU", ""]
    device = _device(results)
    if device is None:
        lines += ["Nothing was measured on a GPU yet: no figure of this page exists. The command "
                  "that measures and writes this page:", "", _COMMAND, ""]  # fmt: skip
    else:
        lines += [f"{f'Revision {revision}. ' if revision else ''}{device}. By:", "", _COMMAND, ""]
        absent = [part for part in PARTS if part not in measured]
        if absent:
            lines += [f"Not measured: {', '.join(absent)}.", ""]
    lines += _goals(results)
    for name, section in (
        ("checks", _checks), ("attention", _attention), ("steps", _steps),
        ("few", _few), ("profile", _profile), ("training", _training),
    ):  # fmt: skip
        if name in results:
            lines += section(results[name])
    return "\n".join(lines).rstrip() + "\n"


def _device(results: Results) -> str | None:
    """What it ran on; None if on no GPU."""
    for part in PARTS:
        machine = results.get(part, {}).get("machine", {})
        if machine.get("device", "cpu") != "cpu":
            versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
            text = f"{machine['device']}, {machine['memory_gib']:.0f} GiB; {versions}"
            if machine.get("peaks"):
                text += (
                    f"; a bf16 product of 8,192 x 8,192 matrices reaches "
                    f"{machine['peaks']['bf16_flop_per_s'] / 1e12:.0f} TFLOP/s, a copy "
                    f"{machine['peaks']['copied_bytes_per_s'] / 1e12:.2f} TB/s"
                )
            if machine.get("clocks"):
                text += f"; SM clock {machine['clocks'].get('clocks.sm', '?')} before"
            if machine.get("missing"):
                text += "; missing: " + ", ".join(machine["missing"])
            return text
    return None


def _row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def _number(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _goals(results: Results) -> list[str]:
    lines = ["## Goals", "", "One H100 or H200, vocabulary of 50,000, bf16, real optimizer steps; "
             "documents fill the rows.", "",
             _row("goal", "", "measured", "ratio", "verdict"),
             "|---|---|---|---|---|"]  # fmt: skip
    # What ran on a CPU, as in the tests, says nothing about the goals.
    verdicts = judge(results if _device(results) is not None else {})
    for verdict in verdicts:
        goal = verdict.goal
        sign = "<=" if goal.at_most else ">="
        target = f"{sign} {_number(goal.target)} {goal.unit}".rstrip()
        lines.append(
            _row(
                goal.text,
                target,
                _number(verdict.measured),
                "" if verdict.ratio is None else f"{verdict.ratio:.2f}",
                verdict.text,
            )
        )
    return [*lines, ""]


def _checks(found: dict[str, Any]) -> list[str]:
    lines = ["## Correctness", "", _row("check", "result", "numbers"), "|---|---|---|"]
    tiles = found["checks"].get(TILES, {}).get("numbers", {})
    for name, one in found["checks"].items():
        if name == TILES:
            lines.append(_row(name, one["result"], "below"))
            continue
        numbers = ", ".join(f"{key} {value:.3g}" for key, value in one.get("numbers", {}).items())
        lines.append(_row(name, one["result"], numbers))
    if tiles:
        lines += ["", "Milliseconds of a kernel over 32,768 tokens and 12 heads; `*`: the fastest, "
                  "which runs on such a GPU take. `apart`: delta, keys and queries, in place of "
                  "the window's one.", "", _row("kernel: tile", "ms"), "|---|---|",
                  *(_row(name, f"{ms:.3f}") for name, ms in tiles.items())]  # fmt: skip
    return [*lines, ""]


def _attention(found: dict[str, Any]) -> list[str]:
    lines = ["## Attention of one layer, forward and backward", "",
             "GB/s and TFLOP/s count what must be moved and computed; x flash is the time over "
             "that of the fastest plain attention.", ""]  # fmt: skip
    for name, case in found["cases"].items():
        if "not measured" in case:
            lines += [f"{name}: not measured, {case['not measured']}", ""]
            continue
        lines += [f"### {name}", "", _row("subject", "ms", "spread", "GB/s", "TFLOP/s", "x flash"),
                  "|---|---|---|---|---|---|"]  # fmt: skip
        for subject, one in case["subjects"].items():
            if "ms" not in one:
                lines.append(_row(subject, f"not measured: {one['not measured']}", *[""] * 4))
                continue
            flash = f"{one['x_flash']:.2f}" if "x_flash" in one else ""
            bound = ", host-bound" if one["host_bound"] else ""
            lines.append(_row(subject, f"{one['ms']:.3f}{bound}", f"{one['spread']:.1%}",
                              _number(one["gb_per_s"]), _number(one["tflop_per_s"]),
                              flash))  # fmt: skip
        lines.append("")
    return lines


def _steps(found: dict[str, Any]) -> list[str]:
    setting = found["setting"]
    lines = ["## Training steps", "",
             f"One micro-batch a step, vocabulary {setting['vocab_size']:,}. tokens/s: median of "
             "the rounds, padding not counted; spread: the range between quartiles over it; of "
             "peak: FLOP/s that these tokens need, attention within documents of their real "
             "lengths, over those of a large bf16 product. Subjects: see "
             "`benchmarks/step_subjects.py`.", "",
             *_step_table(found), "", "What computed them (true: fused kernels):", ""]  # fmt: skip
    lines += [
        f"- {name}: " + ", ".join(f"{part}: {value}" for part, value in of["chosen"].items())
        for name, of in found["subjects"].items()
        if "chosen" in of
    ]
    return [*lines, ""]


def _few(found: dict[str, Any]) -> list[str]:
    return ["## Training steps of few tokens", "", *_step_table(found), ""]


def _step_table(found: dict[str, Any]) -> list[str]:
    columns = ("subject", "length, slots", "tokens/s", "spread", "rounds", "of peak", "peak GiB",
               "plan GiB", "first step s")  # fmt: skip
    lines = [_row(*columns), "|---" * len(columns) + "|"]
    empty = [""] * (len(columns) - 3)
    for name, of in (found.get("absent", {}) | found["subjects"]).items():
        if "error" in of:
            lines.append(_row(name, "", f"not measured: {of['error']}", *empty))
        for size, at in of.get("cases", {}).items():
            if not at.get("tokens_per_s"):
                why = at.get("error", "no turn was left in the budget")
                lines.append(_row(name, size, f"not measured: {why}", *empty))
                continue
            note = f"; then {at['error']}" if "error" in at else ""
            if at["tokens"] != int(size.split()[1]):
                note += f"; of {at['tokens']:,}, for memory"
            lines.append(_row(
                name, size, _number(at["median"]) + note, _percent(at.get("spread")),
                len(at["tokens_per_s"]), _percent(at.get("of_peak")), at.get("peak_gib", ""),
                f"{at['plan_gib']:.2f}" if "plan_gib" in at else "", f"{at['first_step_s']:.1f}",
            ))  # fmt: skip
    return lines


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _profile(found: dict[str, Any]) -> list[str]:
    lines = ["## Where the time of a step goes", "",
             f"RoFormerV2 base, {found['untraced_step_ms']:.2f} ms a step, "
             f"{found['step_ms']:.2f} ms traced.", "",
             _row("part", "ms a step", "share", "of the roofline"),
             "|---|---|---|---|"]  # fmt: skip
    for part, ms in found["categories_ms"].items():
        share = found["roofline"].get(part)
        lines.append(_row(part, f"{ms:.2f}", f"{ms / found['step_ms']:.1%}", _percent(share)))
    lines += ["", _row("kernel", "kind", "ms a step"), "|---|---|---|"]
    lines += [_row(f"`{name[:80]}`", kind, f"{ms:.2f}") for kind, name, ms in found["kernels"][:12]]
    return [*lines, ""]


def _training(found: dict[str, Any]) -> list[str]:
    lines = ["## A real training run", "", _row("", ""), "|---|---|"]
    lines += [_row(name, _number(value) if isinstance(value, float) else value)
              for name, value in found.items()
              if name not in ("machine", "first_losses")]  # fmt: skip
    return [*lines, ""]


def main() -> None:
    """Writes the page; says on standard output which goals were missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", type=Path, help="Markdown file; default: FOLDER/gpu.md")
    parser.add_argument("--revision", default="", help="of the project, which was measured")
    arguments = parser.parse_args()
    results = read_results(arguments.folder)
    table = arguments.table or arguments.folder / "gpu.md"
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(report(results, arguments.revision), encoding="utf-8")
    if _device(results) is None:
        sys.stdout.write("nothing was measured on a GPU\n")
        return
    for verdict in judge(results):
        sys.stdout.write(f"{verdict.text:<40} {_number(verdict.measured):>14}  "
                         f"{verdict.goal.text}\n")  # fmt: skip


if __name__ == "__main__":
    main()
