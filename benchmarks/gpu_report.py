"""The GPU results as Markdown; says plainly what was not measured.

    python -m benchmarks.gpu_report FOLDER [--table benchmarks/results/gpu.md]

FOLDER has what `benchmarks/run_gpu.sh` left: machine.json, correctness.json, attention.json,
step.json, and training.json of `benchmarks/train_gpu.sh`. What is not there was not measured.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.goals import Results, judge

PARTS = ("machine", "correctness", "attention", "step", "training")
_COMMAND = """\
```
python -m data_prep run configs/prep/demo.yaml output_dir=DATA   # or a dataset of your own
DATA=DATA OUT=results benchmarks/run_gpu.sh           # below 9 minutes on one GPU
DATA=DATA OUT=results benchmarks/train_gpu.sh         # a real training run of 10 minutes
```"""


def read_results(folder: Path) -> Results:
    """The parts that are there."""
    found = {}
    for part in PARTS:
        path = folder / f"{part}.json"
        if path.exists():
            found[part] = json.loads(path.read_text(encoding="utf-8"))
    return found


def report(results: Results) -> str:
    """The whole page."""
    measured = [part for part in PARTS if part in results]
    lines = ["# Speed on one GPU", ""]
    device = _device(results)
    if device is None:
        lines += ["Nothing was measured on a GPU yet: no figure of this page exists. The command "
                  "that measures and writes this page:", "", _COMMAND, ""]  # fmt: skip
    else:
        lines += [f"{device}. By:", "", _COMMAND, ""]
        absent = [part for part in PARTS[1:] if part not in measured]
        if absent:
            lines += [f"Not measured: {', '.join(absent)}.", ""]
    lines += _goals(results)
    for name, section in (
        ("correctness", _correctness), ("attention", _attention), ("step", _steps),
        ("training", _training),
    ):  # fmt: skip
        if name in results:
            lines += section(results[name])
    return "\n".join(lines).rstrip() + "\n"


def _device(results: Results) -> str | None:
    """What it ran on; None if on no GPU."""
    for part in PARTS:
        found = results.get(part, {})
        machine = found if part == "machine" else found.get("machine", {})
        if machine.get("device", "cpu") != "cpu":
            versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
            text = f"{machine['device']}, {machine['memory_gib']:.0f} GiB; {versions}"
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
    lines = ["## Goals", "", "One H200, vocabulary of 50,000, bf16, real optimizer steps.", "",
             _row("goal", "", "floor", "measured", "ratio", "verdict"),
             "|---|---|---|---|---|---|"]  # fmt: skip
    # What ran on a CPU, as in the tests, says nothing about the goals.
    verdicts = judge(results if _device(results) is not None else {})
    for verdict in verdicts:
        goal = verdict.goal
        sign = "<=" if goal.at_most else ">="
        floor = "" if goal.floor is None else _number(goal.floor)
        target = f"{sign} {_number(goal.target)} {goal.unit}".rstrip()
        lines.append(
            _row(
                goal.text,
                target,
                floor,
                _number(verdict.measured),
                "" if verdict.ratio is None else f"{verdict.ratio:.2f}",
                verdict.text,
            )
        )
    return [*lines, ""]


def _correctness(found: dict[str, Any]) -> list[str]:
    lines = ["## Correctness", "", _row("check", "result", "numbers"), "|---|---|---|"]
    for name, one in found["checks"].items():
        numbers = ", ".join(f"{key} {value:.3g}" for key, value in one.get("numbers", {}).items())
        lines.append(_row(name, one["result"], numbers))
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
             f"Micro-batches of {found['tokens']:,} slots, vocabulary {setting['vocab_size']:,}, "
             "one a step. tokens/s: median of the rounds, padding not counted; spread: the range "
             "between quartiles over it. Subjects: see `benchmarks/step_subjects.py`.",
             "", _row("subject", "length", "tokens/s", "spread", "rounds", "MFU", "peak GiB",
                      "slots", "first step s"),
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, of in (found.get("absent", {}) | found["subjects"]).items():
        if "error" in of:
            lines.append(_row(name, "", f"not measured: {of['error']}", *[""] * 6))
        for length, at in of.get("lengths", {}).items():
            if not at.get("tokens_per_s"):
                why = at.get("error", "no turn was left in the budget")
                lines.append(_row(name, length, f"not measured: {why}", *[""] * 6))
                continue
            mfu = f"{at['mfu']:.1%}" if "mfu" in at else ""
            spread = f"{at['spread']:.1%}" if "spread" in at else ""
            note = f"; then {at['error']}" if "error" in at else ""
            lines.append(_row(name, length, _number(at["median"]) + note, spread,
                              len(at["tokens_per_s"]), mfu, at.get("peak_gib", ""),
                              f"{at['tokens']:,}", f"{at['first_step_s']:.1f}"))  # fmt: skip
    chosen = {
        name: ", ".join(f"{part}: {value}" for part, value in of["chosen"].items())
        for name, of in found["subjects"].items()
        if "chosen" in of
    }
    lines += ["", "What computed them (true: fused kernels):", ""]
    lines += [f"- {name}: {text}" for name, text in chosen.items()]
    lines += ["", *_profiles(found.get("profiles", {}))]
    return lines


def _profiles(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, one in found.items():
        lines += [f"### Where the time goes: {name}", ""]
        if "error" in one:
            lines += [f"not measured: {one['error']}", ""]
            continue
        lines += [_row("part", "ms a step", "share", "of the roofline"), "|---|---|---|---|"]
        for part, ms in one["categories_ms"].items():
            share = one.get("roofline", {}).get(part)
            lines.append(_row(part, f"{ms:.2f}", f"{ms / one['step_ms']:.1%}",
                              "" if share is None else f"{share:.0%}"))  # fmt: skip
        lines += [_row("sum", f"{one['step_ms']:.2f}", "", ""), ""]
        if not one["head_told_apart"]:
            lines += ["Head and loss are in GEMM and elementwise: the model is one graph.", ""]
    return lines


def _training(found: dict[str, Any]) -> list[str]:
    lines = ["## A real training run", "", _row("", ""), "|---|---|"]
    lines += [_row(name, _number(value) if isinstance(value, float) else value)
              for name, value in found.items() if name != "machine"]  # fmt: skip
    return [*lines, ""]


def main() -> None:
    """Writes the page; says on standard output which goals were missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", type=Path, help="Markdown file; default: FOLDER/gpu.md")
    arguments = parser.parse_args()
    results = read_results(arguments.folder)
    table = arguments.table or arguments.folder / "gpu.md"
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(report(results), encoding="utf-8")
    if _device(results) is None:
        sys.stdout.write("nothing was measured on a GPU\n")
        return
    for verdict in judge(results):
        sys.stdout.write(f"{verdict.text:<40} {_number(verdict.measured):>14}  "
                         f"{verdict.goal.text}\n")  # fmt: skip


if __name__ == "__main__":
    main()
