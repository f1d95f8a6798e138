"""Finds where runs differ, from the files of their folders: config, batches, loss and speed.

Each run is compared with the first one. Losses in metrics.jsonl have all their digits, so equal
ones are equal bit for bit.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from pipeline.config.runs import load_run
from pipeline.config.schema import walk
from pipeline.data.record import read_batches
from pipeline.errors import ConfigError
from pipeline.inspect.curves import Line, Panel, draw
from pipeline.runtime.files import read_json_lines, write_atomic
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import number, short_path, table
from pipeline.sinks.glance import MetricLines

_NOT_COMPARED = {"run_dir"}
_OF_START = ("world_size", "fingerprint", "git_revision", "python", "torch", "deepspeed")
"""What the newest start of a run recorded beside its config."""
_LONGEST = 28
"""Letters of a value in the table."""


@dataclass(frozen=True)
class ReadRun:
    """What a run's folder says."""

    name: str
    config: dict[str, Any]
    """Every value by its path, and what its newest start recorded."""
    batches: dict[int, str]
    """Hash and step of each batch; empty if they are not recorded."""
    losses: dict[int, float]
    """Logged training loss by step; NaN where it was not finite."""
    began: dict[int, int]
    """The step behind which the mean of a logged loss begins, by step."""
    held_out: dict[int, float]
    """Held-out loss by step."""
    tokens: dict[int, float]
    """Tokens seen by step, also before a fork; empty where they are not known."""
    tokens_per_s: float | None
    """Median of the log lines."""
    unigram_entropy: float | None


@dataclass(frozen=True)
class Setting:
    """A value that is not the same in all runs."""

    key: str
    values: list[Any]


@dataclass(frozen=True)
class Difference:
    """Where a run first differs from the first run, in one respect."""

    what: str
    """`batch`, `loss` or `held-out loss`."""
    run: str
    compared: int
    """How many of them both runs have."""
    first: int | None
    """Batch, or step of a loss, at which they first differ; None: nowhere."""
    values: list[str]
    """There, in the first run and in this one."""


@dataclass(frozen=True)
class RunScore:
    """How good and how fast a run is; None: not known."""

    run: str
    step: int
    tokens: float | None
    loss: float | None
    """Loss in the last log line."""
    best_loss: float | None
    held_out_loss: float | None
    best_held_out_loss: float | None
    loss_at_equal_step: float | None
    loss_at_equal_tokens: float | None
    tokens_per_s: float | None


@dataclass(frozen=True)
class Comparison:
    """Where runs differ."""

    runs: list[str]
    config: list[Setting]
    differences: list[Difference]
    equal_step: int | None
    """The last step whose loss all runs logged."""
    equal_tokens: float | None
    """The tokens of the run that has seen fewest."""
    scores: list[RunScore]


def read_runs(folders: Sequence[Path]) -> list[ReadRun]:
    """Read run folders; nothing in them is changed.

    Raises:
        RunFolderError: a folder is not that of a started run.
        ConfigError: there is one folder only.
        DataError: the record of batches is damaged.
    """
    if len(folders) < 2:
        raise ConfigError(f"{folders[0]} is one run; expected two or more: name what to compare")
    return [_read(folder) for folder in folders]


def _read(folder: Path) -> ReadRun:
    run = RunFolder.started(folder)
    attempts = read_json_lines(run.attempts)
    config = {path: value for path, _, value in walk(load_run(run.resolved).config)}
    lines = MetricLines(run).valid(attempts)
    train = [line for line in lines if line["kind"] == "train"]
    evaluations = [line for line in lines if line["kind"] == "eval"]
    before: dict[int, float] = {} if attempts[0].get("resumed_from_step") else {0: 0.0}
    if of := attempts[0].get("continued_from"):
        source = Path(of["checkpoint"]).parents[1]
        theirs = _read(source).tokens if RunFolder(source).has_started else {}
        before = {step: tokens for step, tokens in theirs.items() if step <= of["step"]}
    steps = [line["step"] for line in train]
    seen: dict[int, float] = {}
    if before and all("tokens" in line for line in train):
        sums = accumulate((line["tokens"] for line in train), initial=max(before.values()))
        seen = dict(zip(steps, list(sums)[1:], strict=True))
    speeds = [line["tokens_per_s"] for line in train if line["tokens_per_s"]]
    return ReadRun(
        name=short_path(str(folder)),
        config=config | {name: attempts[-1].get(name) for name in _OF_START},
        batches=_batches(folder) if run.batches.is_file() else {},
        losses=_losses(train),
        began=dict(zip(steps, [attempts[0].get("resumed_from_step") or 0, *steps], strict=False)),
        held_out=_losses(evaluations),
        tokens=seen,
        tokens_per_s=statistics.median(speeds) if speeds else None,
        unigram_entropy=evaluations[-1].get("unigram_entropy") if evaluations else None,
    )


def _batches(folder: Path) -> dict[int, str]:
    return {
        record.batch: f"{record.hash:016x} "
        f"({'skipped' if record.step is None else f'step {record.step}'})"
        for record in read_batches(folder)
    }


def _losses(lines: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    return {line["step"]: math.nan if line["loss"] is None else line["loss"] for line in lines}


def compare(runs: Sequence[ReadRun]) -> Comparison:
    """Compare runs with the first one, and their losses at equal steps and tokens."""
    steps = set.intersection(*(set(run.began.items()) for run in runs))
    step = max((step for step, _ in steps), default=None)
    known = all(run.tokens for run in runs)
    tokens = min(max(run.tokens.values()) for run in runs) if known else None
    return Comparison(
        runs=[run.name for run in runs],
        config=[
            Setting(key, values)
            for key in dict.fromkeys(key for run in runs for key in run.config)
            for values in [_values(runs, key)]
            if key not in _NOT_COMPARED and any(value != values[0] for value in values)
        ],
        differences=[each for run in runs[1:] for each in _differences(runs[0], run)],
        equal_step=step,
        equal_tokens=tokens,
        scores=[_score(run, step, tokens) for run in runs],
    )


def _values(runs: Sequence[ReadRun], key: str) -> list[Any]:
    values = [run.config.get(key) for run in runs]
    plain = (bool, int, float, str, type(None))
    return [value if isinstance(value, plain) else str(value) for value in values]


def _differences(base: ReadRun, run: ReadRun) -> Iterator[Difference]:
    for what, one, other in (
        ("batch", base.batches, run.batches),
        # As text, because NaN does not equal itself.
        ("loss", _texts(base.losses, base, run), _texts(run.losses, base, run)),
        ("held-out loss", _texts(base.held_out), _texts(run.held_out)),
    ):
        common = sorted(one.keys() & other.keys())
        first = next((at for at in common if one[at] != other[at]), None)
        values = [] if first is None else [one[first], other[first]]
        yield Difference(what, run.name, len(common), first, values)


def _texts(losses: dict[int, float], *runs: ReadRun) -> dict[int, str]:
    # A save has a line, too, and the next one is a mean of fewer steps.
    began = [{run.began.get(step) for run in runs} for step in losses]
    return {
        step: repr(loss)
        for (step, loss), of in zip(losses.items(), began, strict=True)
        if len(of) < 2
    }


def _score(run: ReadRun, step: int | None, tokens: float | None) -> RunScore:
    # The nearest line: batches of as many slots differ by a few tokens.
    near = None
    if tokens is not None and min(run.tokens.values()) <= tokens:
        near = min(run.tokens, key=lambda at: abs(run.tokens[at] - tokens))
    return RunScore(
        run=run.name,
        step=max(run.losses, default=0),
        tokens=max(run.tokens.values(), default=None),
        loss=_finite(list(run.losses.values())[-1:]),
        best_loss=_finite(run.losses.values()),
        held_out_loss=_finite(list(run.held_out.values())[-1:]),
        best_held_out_loss=_finite(run.held_out.values()),
        loss_at_equal_step=_finite([run.losses[step]] if step is not None else []),
        loss_at_equal_tokens=_finite([run.losses[near]] if near is not None else []),
        tokens_per_s=run.tokens_per_s,
    )


def _finite(losses: Any) -> float | None:
    """Return the smallest loss that is a number."""
    return min((loss for loss in losses if math.isfinite(loss)), default=None)


def comparison_text(comparison: Comparison) -> Iterator[str]:
    """Describe a comparison for a terminal."""
    letters = [chr(ord("A") + i) if i < 26 else str(i) for i in range(len(comparison.runs))]
    letter_of = dict(zip(comparison.runs, letters, strict=True))
    yield from (f"{letter}  {name}" for name, letter in letter_of.items())
    yield ""
    if comparison.config:
        rows = [[each.key, *map(_cell, each.values)] for each in comparison.config]
        yield from table([["config", *letters], *rows])
    else:
        yield "config: the same"
    yield ""
    for each in comparison.differences:
        name = f"{each.what}, {letters[0]} and {letter_of[each.run]}:"
        if not each.compared:
            yield f"{name} not known, the runs have none in common"
        elif each.first is None:
            yield f"{name} the same, {each.compared:,} compared"
        else:
            unit = "batch" if each.what == "batch" else "step"
            yield f"{name} first differs at {unit} {each.first:,}, {' against '.join(each.values)}"
    yield ""
    yield from table(_score_rows(comparison, letters), right=range(1, len(letters) + 1))


def _score_rows(comparison: Comparison, letters: list[str]) -> list[list[str]]:
    scores, tokens, step = comparison.scores, comparison.equal_tokens, comparison.equal_step
    rows = [
        ("last step logged", [f"{each.step:,}" for each in scores]),
        ("tokens seen", [number(each.tokens, ",.0f") for each in scores]),
        ("loss, last", [number(each.loss, ".4f") for each in scores]),
        ("loss, lowest", [number(each.best_loss, ".4f") for each in scores]),
    ]
    if step is not None:
        at_step = [number(each.loss_at_equal_step, ".4f") for each in scores]
        rows.append((f"loss at step {step:,}", at_step))
    if tokens is not None:
        at_tokens = [number(each.loss_at_equal_tokens, ".4f") for each in scores]
        rows.append((f"loss at {tokens:,.0f} tokens", at_tokens))
    rows += [
        ("held-out loss, last", [number(each.held_out_loss, ".4f") for each in scores]),
        ("held-out loss, lowest", [number(each.best_held_out_loss, ".4f") for each in scores]),
        ("tokens a second, median", [number(each.tokens_per_s, ",.0f") for each in scores]),
    ]
    return [["", *letters], *([name, *cells] for name, cells in rows)]


def _cell(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def write_plot(path: Path, runs: Sequence[ReadRun], comparison: Comparison) -> None:
    """Draw the losses of runs as .svg, or as an .html page with the text of the comparison.

    Raises:
        ConfigError: the file has another ending.
    """
    if path.suffix not in (".svg", ".html"):
        raise ConfigError(f"--plot {path}: expected a name that ends in .svg or .html")
    entropies = {run.unigram_entropy for run in runs if run.unigram_entropy is not None}
    panels = [
        Panel("training loss", [Line(run.name, list(run.losses.items())) for run in runs], "step"),
        Panel("training loss", [Line(run.name, _by_tokens(run)) for run in runs], "tokens"),
        Panel("held-out loss", [Line(r.name, list(r.held_out.items())) for r in runs], "step"),
    ]
    dotted = {"unigram entropy": entropies.pop()} if len(entropies) == 1 else {}
    text = draw(panels, y_name="nats", dotted=dotted)
    if path.suffix == ".html":
        lines = escape("\n".join(comparison_text(comparison)))
        text = (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
            f"<title>{escape(', '.join(comparison.runs))}</title></head><body>\n{text}"
            f'<pre style="white-space: pre-wrap">{lines}</pre></body></html>\n'
        )
    write_atomic(path, text.encode())


def _by_tokens(run: ReadRun) -> list[tuple[float, float]]:
    return [(run.tokens[step], loss) for step, loss in run.losses.items() if step in run.tokens]
