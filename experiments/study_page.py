"""The results of a study as a page, JSON and figures."""

import os
import platform
import re
import textwrap
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments import budgets, page
from experiments.effects import (
    POOLED,
    CellSummary,
    Decision,
    Effect,
    Slope,
    effects,
    slopes,
    summaries,
    values_by_seed,
    verdicts,
)
from experiments.page import Point, draw_points, numbers_of, style, svg
from experiments.read import Reading
from experiments.study import StudyCell, StudyPlan
from pipeline.config.load import provenance
from pipeline.runtime.summary import duration
from pipeline.tasks.intervals import LEVEL, Interval, RowVariance, judged

_NOTE = "Small marks: seeds; large: their mean. Bars: 95% interval of the paired difference."
_TITLE_LETTERS = 42
_MEANING = {
    "held_out_loss": ("held-out loss", "nats"),
    "loss": ("held-out loss", "nats"),
    "train_loss": ("training loss", "nats"),
    "accuracy": ("masked tokens found", "share"),
    "tokens_per_s": ("speed", "tokens/s"),
    "entropy": ("entropy of attention", "of log(keys)"),
    "js_layers": ("divergence of layers", "nats"),
    "js_heads": ("divergence of heads", "nats"),
    "nats_per_char": ("loss", "nats a letter"),
    "nats_per_char_listed": ("loss of new words", "nats a letter"),
    "nats_per_char_others": ("loss of others", "nats a letter"),
    "nats_per_char_from_left": ("loss from the left", "nats a letter"),
    "pieces_per_char": ("pieces", "a letter"),
}
"""What the values of a metric are, and their unit; of all others a score."""
_NOT_WRITTEN = "No conclusion has been written yet; what the numbers decide by themselves:"


def write(
    plan: StudyPlan,
    readings: Mapping[str, Reading],
    batches: str,
    folder: Path,
    before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write NAME.md, NAME.json and a figure a part into a folder; return what the JSON holds.

    Args:
        plan: the study's.
        readings: of its runs, by name.
        batches: what was compared of the runs' batches.
        folder: where to.
        before: the JSON of a page that is written again without its runs, which keeps what only
            they could tell: versions, and what rows do.
    """
    known: dict[Decision, RowVariance] | None = None
    if before:
        with_rows = [effect for effect in before["effects"] if effect.get("rows")]
        known = {(of["metric"], tuple(of["runs"])): RowVariance(*of["rows"]) for of in with_rows}
    compared, cells = effects(plan, readings, known), summaries(plan, readings)
    compared, fits, needed, how_sure = _corrected(
        compared, slopes(plan, compared), budgets.budgets(plan, readings)
    )
    of_machine = {**provenance(), "machine": platform.machine(), "device": _device()}
    body = {
        "study": plan.name,
        "preset": plan.preset,
        "overrides": list(plan.overrides),
        "partial": any(cell.open for cell in cells),
        "level": LEVEL,
        "seeds": list(plan.seeds),
        "most_seeds": plan.most_seeds,
        "batches": batches,
        "verdicts": verdicts(plan, compared, fits, cells) + budgets.sentences(needed),
        "how_sure": how_sure,
        "effects": [asdict(effect) | {"verdict": effect.verdict} for effect in compared],
        "cells": [asdict(cell) for cell in cells],
        "runs": {name: _run(plan, name, reading) for name, reading in readings.items()},
        "slopes": [fit.plain() for fit in fits],
        **({"budgets": [asdict(each) for each in needed]} if needed else {}),
        "versions": before["versions"] if before else of_machine,
    }
    body = dict(page.plain(body))
    drawn = {part: figure(plan, part, compared, cells, readings) for part in plan.parts}
    figures = {part: picture for part, picture in drawn.items() if picture is not None}
    lines = _page(plan, body, (compared, cells, needed), list(figures))
    files = {f"{plan.name}-{part}.svg": picture for part, picture in figures.items()}
    page.write(folder, plan.name, body, lines, files)
    return body


def _corrected(
    compared: Sequence[Effect], fits: Sequence[Slope], needed: Sequence[budgets.Budget]
) -> tuple[list[Effect], list[Slope], list[budgets.Budget], str]:
    """Correct all decisions of a page for their number; return them, and the sentence on it."""
    decisions: dict[Hashable, Interval | None] = {b.decision: b.interval for b in needed}
    decisions |= {effect.decision: effect.interval for effect in compared}  # with chance of rows
    stands, how_sure = judged(decisions | {n: fit.interval for n, fit in enumerate(fits)})
    return (
        [replace(effect, stands=stands.get(effect.decision)) for effect in compared],
        [replace(fit, stands=stands.get(n)) for n, fit in enumerate(fits)],
        [replace(budget, stands=stands.get(budget.decision)) for budget in needed],
        how_sure,
    )


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
    return {**about, **reading.plain()}


def _page(
    plan: StudyPlan,
    body: Mapping[str, Any],
    numbers: tuple[Sequence[Effect], Sequence[CellSummary], Sequence[budgets.Budget]],
    pictures: Sequence[str],
) -> Iterator[str]:
    compared, cells, needed = numbers
    study, state = plan.study, "partial results" if body["partial"] else ""
    yield f"# {plan.name}: {study.question}"
    yield ""
    if state:
        # Each run once, whichever parts ask for it.
        states = [run["outcome"] for run in body["runs"].values()]
        num_open = sum(outcome not in ("finished", "diverged") for outcome in states)
        yield f"**Partial results**: {num_open} runs are not done."
        yield ""
    yield study.conclusion.strip() or _NOT_WRITTEN
    yield ""
    yield from (f"- {line}" for line in body["verdicts"])
    yield ""
    yield body["how_sure"]
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
        for statement in part.published:
            yield f"- Published: {statement.says} ({statement.source})"
        if part.other_batches:
            yield f"- Arms of a seed see other batches: {part.other_batches}"
        if name in pictures:
            yield ""
            yield f"![{name}]({plan.name}-{name}.svg)"
        yield ""
        yield from _table([cell for cell in cells if cell.cell.part == name], part.metrics)
        if of_name := [effect for effect in compared if effect.part == name]:
            yield ""
            yield from _difference_table(of_name)
        if of_part := [each for each in needed if each.part == name]:
            yield ""
            yield from budgets.table(of_part)


def _counted(body: Mapping[str, Any]) -> str:
    runs = list(body["runs"].values())
    states = [run["outcome"] for run in runs]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    seconds = sum(run["seconds"] for run in runs)
    known = [run["versions"] for run in runs if run["versions"]]
    what = {"torch": "torch", "text": "fingerprint", "revision": "git_revision"}
    said = [f"{name} {of}" for name, key in what.items() if (of := _versions(known, key))]
    about = ", ".join([f"{duration(seconds)} of training", *said])
    # The doctor's limits were set by other runs (benchmarks/doctor.py): each page tries them anew.
    told = {
        stuck: [r["told"] for r in runs if "told" in r and r["stuck"] == stuck]
        for stuck in (True, False)
    }
    if sum(map(len, told.values())):
        about += ". The warning `plateau` told " + " and ".join(
            f"{sum(of)} of {len(of)} that {what}"
            for of, what in zip(told.values(), ("are stuck", "are not"), strict=True)
        )
    return f"{len(runs)} runs ({counted}), {about}"


def _versions(known: Sequence[Mapping[str, Any]], key: str) -> str:
    """Name the versions of runs, hashes cut, with the number of runs where there are several."""
    values = [str(of[key]) for of in known if of.get(key)]
    short = [re.sub(r"[0-9a-f]{12,}", lambda hash: hash[0][:12], value) for value in values]
    counted = {value: short.count(value) for value in dict.fromkeys(short)}
    several = len(counted) > 1
    return " and ".join(f"{of} ({n} runs)" if several else of for of, n in counted.items())


def _table(cells: Sequence[CellSummary], metrics: Sequence[str]) -> Iterator[str]:
    """Write means ± standard deviations over seeds."""
    rows = []
    for summary in cells:
        shown = []
        for metric in metrics:
            spread = summary.deviations.get(metric)
            text = f"{summary.means[metric]:.4f}" if metric in summary.means else ""
            shown.append(text if spread is None else f"{text} ± {spread:.4f}")
        total = summary.finished + summary.diverged + summary.open
        counts = (f"{summary.finished}/{total}", str(summary.diverged), str(summary.stuck))
        rows.append(("/".join(summary.cell.levels), summary.cell.arm, *counts, *shown))
    head = ("levels", "arm", "finished", "diverged", "stuck", *metrics)
    return page.table("llrrr" + "r" * len(metrics), head, rows)


def _difference_table(compared: Sequence[Effect]) -> Iterator[str]:
    """Write paired differences; a lost pair is one whose runs are not both there."""
    rows = []
    for effect in compared:
        mean = limits = ""
        if effect.interval is not None:
            mean = f"{effect.interval.mean:+.4f}"
            if effect.interval.method != "none":
                low, high = effect.interval.low, effect.interval.high
                limits = f"{low:+.4f} .. {high:+.4f} ({effect.interval.method})"
        pairs = f"{len(effect.pairs)} ({effect.lost})"
        after = {True: "stands", False: "falls", None: ""}[effect.stands]
        arms = f"{effect.arm} - {effect.against}"
        levels = "/".join(effect.levels)
        rows.append((levels, arms, effect.metric, mean, limits, pairs, effect.verdict, after))
    head = "levels", "arm - against", "metric", "mean", "95% interval", "pairs (lost)", "verdict"
    return page.table("lllrlrll", (*head, "after Holm"), rows)


def figure(
    plan: StudyPlan,
    part: str,
    compared: Sequence[Effect],
    cells: Sequence[CellSummary],
    readings: Mapping[str, Reading],
) -> bytes | None:
    """Draw a part as SVG: its metrics and their paired differences; None without numbers.

    Metrics NAME@X share a panel with X as its axis.
    """
    metrics = _axes(plan.parts[part].metrics)
    mine = [cell.cell for cell in cells if cell.cell.part == part and cell.means]
    if not mine:
        return None
    of_part = [each for each in compared if each.part == part and each.levels != POOLED]
    # Runs that another part probes have profiles, too.
    has_probes = bool(plan.parts[part].probes)
    own = [runs for cell, runs in plan.of_cells.items() if cell.part == part and has_probes]
    probed = [readings[run] for runs in own for run in runs.values()]
    profiles = sorted({name for reading in probed for name in reading.profiles})
    drawn = [
        (title, _values(plan, readings, mine, names), _differences(of_part, names))
        for title, names in metrics.items()
        if any(name in cell.means for cell in cells if cell.cell.part == part for name in names)
    ]
    marks = [sum(map(len, values.values())) for _, values, _ in drawn]
    is_rows = any(numbers_of(_places(values)) is None for _, values, _ in drawn)
    # A category of one arm is named beside it.
    has_legend = bool(profiles) or any(_places(values) != list(values) for _, values, _ in drawn)

    def draw(axes: Any) -> None:
        for row, (title, values, differences) in zip(axes, drawn, strict=False):
            places = _places(values)
            for panel, points in zip(row, (values, differences), strict=True):
                draw_points(panel, points, list(values), places)
            at = "" if len(metrics[title]) > 1 else ", ".join(plan.parts[part].grid)
            _name_axes(row, plan, part, title, places, at)
            if not differences:
                row[1].set_visible(False)
        rest = [panel for row in axes[len(drawn) :] for panel in row]
        for panel, name in zip(rest, profiles, strict=False):
            _draw_profile(panel, plan, part, name, readings)
        for unused in rest[len(profiles) :]:
            unused.set_axis_off()

    num_rows = len(drawn) + -(-len(profiles) // 2)
    least = 2.4 if profiles or not is_rows else 1.7
    height = max(least, 0.9 + 0.13 * max(marks) * is_rows)
    return svg(num_rows, 2, (7.6, 0.5 + height * num_rows), _NOTE, draw, has_legend=has_legend)


def _axes(metrics: Sequence[str]) -> dict[str, list[str]]:
    """Group metrics NAME@X by NAME."""
    axes: dict[str, list[str]] = {}
    for metric in metrics:
        axes.setdefault(metric.partition("@")[0], []).append(metric)
    return axes


def _places(lines: Mapping[str, list[Point]]) -> list[str]:
    return list(dict.fromkeys(point.place for points in lines.values() for point in points))


def _values(
    plan: StudyPlan,
    readings: Mapping[str, Reading],
    cells: Sequence[StudyCell],
    names: Sequence[str],
) -> dict[str, list[Point]]:
    """Return means and seeds of the cells, by the line that they belong to."""
    lines: dict[str, list[Point]] = {}
    for cell in cells:
        for name in names:
            if seeds := tuple(values_by_seed(plan, readings, cell, name).values()):
                label, place = _place(cell.arm, cell.levels, name, len(names))
                lines.setdefault(label, []).append(Point(place, fmean(seeds), None, seeds))
    return lines


def _differences(compared: Sequence[Effect], names: Sequence[str]) -> dict[str, list[Point]]:
    """Return differences with their intervals, by the line of the arm."""
    lines: dict[str, list[Point]] = {}
    for effect in compared:
        if effect.metric in names and (of := effect.interval) is not None:
            label, place = _place(effect.arm, effect.levels, effect.metric, len(names))
            limits = None if of.method == "none" else (of.low, of.high)
            lines.setdefault(label, []).append(Point(place, of.mean, limits))
    return lines


def _place(arm: str, levels: tuple[str, ...], metric: str, num_names: int) -> tuple[str, str]:
    """Return the line that a number belongs to, and its place on it."""
    if num_names > 1:
        return ", ".join((arm, *levels)), metric.partition("@")[2]
    return arm, ", ".join(levels) or arm


def _name_axes(
    row: Any, plan: StudyPlan, part: str, title: str, places: Sequence[str], factors: str
) -> None:
    """Write titles, and the axes' names with units; factors: what numbers without a word are."""
    said, unit = _MEANING.get(title.partition(".")[0], ("score", ""))
    titles = title, f"{title}, minus {plan.parts[part].arms[0]}"
    numbers = numbers_of(places)
    for panel, name, value in zip(row, titles, (said, "difference"), strict=True):
        panel.set_title(textwrap.fill(name, _TITLE_LETTERS))
        value = ", ".join(filter(None, (value, unit)))
        if numbers is None:
            panel.set_xlabel(value)
        else:
            panel.set_ylabel(value)
            is_classes = any(entry.classes for entry in plan.study.tasks.values())
            panel.set_xlabel(
                numbers[0] or factors or ("classes" if is_classes else "length, tokens")
            )
    if numbers is None:
        row[1].axvline(0.0, color="0.6", lw=0.8, zorder=0)
        row[1].set_yticklabels([])
    else:
        row[1].axhline(0.0, color="0.6", lw=0.8, zorder=0)


def _draw_profile(
    panel: Any, plan: StudyPlan, part: str, name: str, readings: Mapping[str, Reading]
) -> None:
    """Draw a quantity by layer: the mean over seeds of each cell."""
    for cell, runs in plan.of_cells.items():
        mine = [readings[run].profiles[name] for run in runs.values() if readings[run].profiles]
        if cell.part == part and mine:
            means = [sum(of) / len(of) for of in zip(*mine, strict=True)]
            shape = style(plan.parts[part].arms.index(cell.arm))
            # A divergence of layers is of a layer from the one below, which the lowest lacks.
            first = 2 if name == "js_layers" else 1
            panel.plot(range(first, len(means) + first), means, ms=4, lw=1, **shape)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set_title(f"{name} by layer, means of seeds")
    panel.set_xlabel("layer, from below")
    panel.set_ylabel(", ".join(filter(None, _MEANING[name])))
