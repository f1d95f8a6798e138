"""The results of a study as a page, JSON and figures; the same numbers give the same bytes."""

import io
import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from experiments.analysis import LEVEL, CellSummary, Effect, effects, slopes, summaries, verdicts
from experiments.read import Reading
from experiments.study import StudyPlan
from pipeline.config.load import provenance
from pipeline.runtime.files import write_atomic
from pipeline.runtime.summary import duration

_NOT_WRITTEN = "No conclusion has been written yet; what the numbers decide by themselves:"
MARKED: dict[str, Any] = {"marker": "o", "ms": 3, "capsize": 2}
SIDE_BY_SIDE = 0.4
"""Share of the room between two places over which their lines' intervals are spread."""
_SMALL = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}


def write(
    plan: StudyPlan,
    readings: Mapping[str, Reading],
    batches: str,
    folder: Path,
) -> dict[str, Any]:
    """Write NAME.md, NAME.json and a figure a part into a folder; return what the JSON holds."""
    found, cells = effects(plan, readings), summaries(plan, readings)
    body = {
        "study": plan.name,
        "preset": plan.preset,
        "overrides": list(plan.overrides),
        "partial": any(cell.open for cell in cells),
        "level": LEVEL,
        "seeds": list(plan.seeds),
        "batches": batches,
        "verdicts": verdicts(plan, found),
        "effects": [_plain(asdict(each) | {"verdict": each.verdict}) for each in found],
        "cells": [_plain(asdict(each)) for each in cells],
        "runs": {name: _run(plan, name, reading) for name, reading in readings.items()},
        "slopes": _plain(slopes(plan, found)),
        "versions": {**provenance(), "machine": platform.machine(), "device": _device()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(
        folder / f"{plan.name}.json", (json.dumps(body, indent=1, allow_nan=False) + "\n").encode()
    )
    pictures = []
    for part in plan.parts:
        text = figure(plan, part, found, cells, readings)
        if text is not None:
            file = f"{plan.name}-{part}.svg"
            write_atomic(folder / file, text)
            pictures.append(part)
    page = "\n".join(_page(plan, body, (found, cells), pictures)) + "\n"
    write_atomic(folder / f"{plan.name}.md", page.encode())
    return body


def _device() -> str:
    """Name what this machine computes on; runs of a cluster name their hosts."""
    if find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return str(torch.cuda.get_device_name())
    return f"{os.cpu_count()} CPU cores"


def _run(plan: StudyPlan, name: str, reading: Reading) -> dict[str, Any]:
    run = plan.runs[name]
    about = {"arm": run.cell.arm, "seed": run.seed, "start": run.start}
    return dict(_plain({**about, **asdict(reading)}))


def _plain(value: Any) -> Any:
    """Replace what JSON does not have: NaN by null, keys that are numbers by text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _page(
    plan: StudyPlan,
    body: Mapping[str, Any],
    numbers: tuple[Sequence[Effect], Sequence[CellSummary]],
    pictures: Sequence[str],
) -> Iterator[str]:
    found, cells = numbers
    study, state = plan.study, "partial results" if body["partial"] else ""
    yield f"# {plan.name}: {study.question}"
    yield ""
    if state:
        yield f"**Partial results**: {sum(cell.open for cell in cells)} runs of cells are not done."
        yield ""
    yield study.conclusion.strip() or _NOT_WRITTEN
    yield ""
    yield from (f"- {line}" for line in body["verdicts"])
    yield ""
    yield _how_sure(plan, found)
    yield ""
    changed = f" {' '.join(plan.overrides)}" if plan.overrides else ""
    yield (
        f"`postnorm study {plan.name} --preset {plan.preset}{changed}`: {_counted(body)}. "
        f"{body['batches'][:1].upper()}{body['batches'][1:]}."
    )
    if study.limits:
        yield ""
        yield f"What this cannot say: {study.limits.strip()}"
    for name, part in plan.parts.items():
        yield ""
        yield f"## {name}: {part.asks}"
        yield ""
        for each in part.published:
            yield f"- Published: {each.says} ({each.source})"
        if part.other_batches:
            yield f"- Arms of a seed see other batches: {part.other_batches}"
        if name in pictures:
            yield ""
            yield f"![{name}]({plan.name}-{name}.svg)"
        yield ""
        yield from _table([cell for cell in cells if cell.cell.part == name], part.metrics)
        yield ""
        yield from _difference_table([each for each in found if each.part == name])


def _how_sure(plan: StudyPlan, found: Sequence[Effect]) -> str:
    with_interval = [e for e in found if e.interval is not None and e.interval.method != "none"]
    if not with_interval:
        return "How sure: not at all, no difference has the two pairs that an interval needs."
    decided = [each for each in with_interval if each.verdict != "not decided"]
    methods = sorted({e.interval.method for e in with_interval if e.interval is not None})
    names = {"t": "Student's t (5 pairs at most)", "bootstrap": "bootstrap of 10,000 draws"}
    return (
        f"How sure: {len(decided)} of {len(with_interval)} differences are decided, their "
        f"{LEVEL:.0%} interval over {len(plan.seeds)} seeds leaves out 0 "
        f"({', '.join(names[each] for each in methods)}); by chance alone about "
        f"{(1 - LEVEL) * len(with_interval):.1f} would."
    )


def _counted(body: Mapping[str, Any]) -> str:
    runs = list(body["runs"].values())
    states = [run["outcome"] for run in runs]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    seconds = sum(run["seconds"] for run in runs)
    hosts = {str(run["versions"].get("torch")) for run in runs if run["versions"]}
    torch = f", torch {', '.join(sorted(hosts))}" if hosts else ""
    return f"{len(runs)} runs ({counted}), {duration(seconds)} of training{torch}"


def _table(cells: Sequence[CellSummary], metrics: Sequence[str]) -> Iterator[str]:
    """Write means ± standard deviations over seeds."""
    yield f"| levels | arm | finished | diverged | stuck | {' | '.join(metrics)} |"
    yield "|---|---|---:|---:|---:|" + "---:|" * len(metrics)
    for each in cells:
        shown = []
        for metric in metrics:
            spread = each.deviations.get(metric)
            text = f"{each.means[metric]:.4f}" if metric in each.means else ""
            shown.append(text if spread is None else f"{text} ± {spread:.4f}")
        levels = "/".join(each.cell.levels)
        total = each.finished + each.diverged + each.open
        counts = f"{each.finished}/{total} | {each.diverged} | {each.stuck}"
        yield f"| {levels} | {each.cell.arm} | {counts} | {' | '.join(shown)} |"


def _difference_table(found: Sequence[Effect]) -> Iterator[str]:
    """Write paired differences; a lost pair is one whose runs are not both there."""
    yield "| levels | arm - against | metric | mean | 95% interval | pairs (lost) | verdict |"
    yield "|---|---|---|---:|---|---:|---|"
    for each in found:
        mean = limits = ""
        if each.interval is not None:
            mean = f"{each.interval.mean:+.4f}"
            if each.interval.method != "none":
                low, high = each.interval.low, each.interval.high
                limits = f"{low:+.4f} .. {high:+.4f} ({each.interval.method})"
        yield (
            f"| {'/'.join(each.levels)} | {each.arm} - {each.against} | {each.metric} | {mean} | "
            f"{limits} | {len(each.pairs)} ({each.lost}) | {each.verdict} |"
        )


def figure(
    plan: StudyPlan,
    part: str,
    found: Sequence[Effect],
    cells: Sequence[CellSummary],
    readings: Mapping[str, Reading],
) -> bytes | None:
    """Draw a part as SVG: its first metrics and their paired differences; None without numbers.

    Metrics NAME@X share a panel with X as its axis.
    """
    metrics = _axes(plan.parts[part].metrics)
    mine = [cell for cell in cells if cell.cell.part == part and cell.means]
    if not mine:
        return None
    # Runs that another part probes have profiles, too.
    probed = _runs_of(plan, part) if plan.parts[part].probes else []
    profiles = sorted({name for run in probed for name in readings[run].profiles})
    columns = max(2, len(profiles))
    rows = len(metrics) + bool(profiles)

    def draw(axes: Any) -> None:
        for row, (title, names) in enumerate(metrics.items()):
            labels = _draw_values(axes[row][0], mine, names)
            of_part = [each for each in found if each.part == part]
            _draw_differences(axes[row][1], of_part, names, labels)
            axes[row][0].set_title(title)
            axes[row][1].set_title(f"{title}, minus {plan.parts[part].arms[0]}")
            for unused in axes[row][2:]:
                unused.set_axis_off()
        for panel, name in zip(axes[-1], profiles, strict=False):
            _draw_profile(panel, plan, part, name, readings)
        if profiles:
            for unused in axes[-1][len(profiles) :]:
                unused.set_axis_off()

    return svg(rows, columns, (3.6 * columns, 2.7 * rows), draw)


def svg(rows: int, columns: int, inches: tuple[float, float], draw: Callable[[Any], None]) -> bytes:
    """Draw panels as SVG, with the legend of the first one below; the same numbers, same bytes.

    Args:
        rows: of panels.
        columns: of panels.
        inches: width and height.
        draw: gets the panels, as `pyplot.subplots` returns them, in rows.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with mpl.rc_context({**_SMALL, "svg.hashsalt": "postnorm", "svg.fonttype": "none"}):
        drawn, axes = pyplot.subplots(
            rows, columns, figsize=inches, squeeze=False, layout="constrained"
        )
        draw(axes)
        handles, labels = axes[0][0].get_legend_handles_labels()
        if handles:
            drawn.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        text = io.BytesIO()
        drawn.savefig(text, format="svg", metadata={"Date": None})
        pyplot.close(drawn)
    # Matplotlib leaves blanks at line ends.
    return b"\n".join(line.rstrip() for line in text.getvalue().splitlines()) + b"\n"


def _runs_of(plan: StudyPlan, part: str) -> list[str]:
    return [r for cell, runs in plan.of_cells.items() if cell.part == part for r in runs.values()]


def _axes(metrics: Sequence[str]) -> dict[str, list[str]]:
    """Group metrics NAME@X by NAME."""
    found: dict[str, list[str]] = {}
    for metric in metrics:
        found.setdefault(metric.partition("@")[0], []).append(metric)
    return found


def _draw_values(panel: Any, cells: Sequence[CellSummary], names: Sequence[str]) -> list[str]:
    """Draw means with deviations over seeds; return the lines' labels, by whose order they have
    their colours.
    """
    lines: dict[str, list[_Point]] = {}
    for cell in cells:
        for name in names:
            if name in cell.means:
                label, place = _place(cell.cell.arm, cell.cell.levels, name, len(names))
                spread = cell.deviations.get(name, 0.0)
                lines.setdefault(label, []).append(_Point(place, cell.means[name], spread, spread))
    _draw_lines(panel, lines, list(lines))
    return list(lines)


def _draw_differences(
    panel: Any, found: Sequence[Effect], names: Sequence[str], labels: Sequence[str]
) -> None:
    """Draw differences with their intervals, in the colours of the arms' lines."""
    lines: dict[str, list[_Point]] = {}
    for each in found:
        if each.metric in names and each.interval is not None:
            label, place = _place(each.arm, each.levels, each.metric, len(names))
            of = each.interval
            known = of.method != "none"
            limits = (of.mean - of.low, of.high - of.mean) if known else (0.0, 0.0)
            lines.setdefault(label, []).append(_Point(place, of.mean, *limits))
    panel.axhline(0.0, color="0.6", lw=0.8)
    _draw_lines(panel, lines, labels)


class _Point(NamedTuple):
    place: str
    mean: float
    below: float
    above: float
    """Lengths of the two halves of its interval."""


def _draw_lines(panel: Any, lines: Mapping[str, list[_Point]], labels: Sequence[str]) -> None:
    """Draw lines in the colours of their labels, side by side where they share a place."""
    places = list(dict.fromkeys(point.place for points in lines.values() for point in points))
    for label, points in lines.items():
        number = labels.index(label)
        shift = SIDE_BY_SIDE * ((number + 0.5) / len(labels) - 0.5)
        at = [places.index(point.place) + shift for point in points]
        means, intervals = [each.mean for each in points], [each[2:] for each in points]
        halves = list(zip(*intervals, strict=True))
        panel.errorbar(at, means, halves, label=label, color=f"C{number}", **MARKED)
    panel.set_xticks(range(len(places)), places)


def _place(arm: str, levels: tuple[str, ...], metric: str, num_names: int) -> tuple[str, str]:
    """Return the line that a number belongs to, and its place on it."""
    if num_names > 1:
        return " ".join((arm, *levels)), metric.partition("@")[2]
    if not levels:
        return arm, ""
    return " ".join((arm, *levels[1:])), levels[0]


def _draw_profile(
    panel: Any, plan: StudyPlan, part: str, name: str, readings: Mapping[str, Reading]
) -> None:
    """Draw a quantity by layer: the mean over seeds of each cell."""
    for cell, runs in plan.of_cells.items():
        mine = [readings[run].profiles[name] for run in runs.values() if readings[run].profiles]
        if cell.part == part and mine:
            means = [sum(of) / len(of) for of in zip(*mine, strict=True)]
            colour = f"C{plan.parts[part].arms.index(cell.arm)}"
            panel.plot(range(1, len(means) + 1), means, marker=".", color=colour)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set_title(f"{name} by layer")
