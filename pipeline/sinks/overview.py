"""A run as two pictures: both losses with what to hold them against, and its numbers as text.

Of what TensorBoard shows first, pictures alone have several lines of one run in one chart, and
marks at steps: its scalars have one line a run. A folder a line, as `SummaryWriter.add_scalars`
makes them, would show each run several times in the list of runs.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from pipeline.config.runs import RunConfig
from pipeline.runtime.summary import counted, number
from pipeline.sinks.glance import Glance, LossTrack, Record, glance

_WIDTH, _HEIGHT = 320, 215
"""Pixels: what a card of TensorBoard's first page shows of a picture; a larger one is made smaller,
and its letters cannot be read any more."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 34, 6, 34, 198
"""Edges of the chart."""
_LARGE, _SMALL = 13, 11
_LINE_HEIGHT = 21
_MOST_POINTS = 400
_TICKS = 5
_LEAST_RANGE = 0.1
_ABOVE_GUESS = 1.25
"""Losses further above a uniform guess, those of a run that breaks, are drawn at the upper edge."""
LOSS, HELD_OUT, _GREY, _BLACK = (31, 97, 166), (224, 108, 17), (120, 120, 120), (30, 30, 30)
# Of colours that the colour-blind tell apart, and each mark is named in the line of its kind.
RESTART, REWIND, _STAGE = (0, 140, 115), (190, 25, 105), (190, 190, 190)
_Colour = tuple[int, int, int]
_Point = tuple[float, float]


Pixels = npt.NDArray[np.uint8]


def pictures(
    config: RunConfig, lines: Sequence[Record], attempts: Sequence[Record]
) -> tuple[Pixels, Pixels]:
    """Draw a run from its valid lines of metrics.jsonl and its starts.

    Returns:
        Its losses by step, and its numbers as text, both (215, 320, 3).
    """
    seen = glance(config, lines, attempts)
    chart, numbers = (Image.new("RGB", (_WIDTH, _HEIGHT), "white") for _ in range(2))
    _Chart(ImageDraw.Draw(chart), seen, _series(lines, "train"), _series(lines, "eval")).draw()
    draw, font = ImageDraw.Draw(numbers), ImageFont.load_default(_LARGE)
    for row, (text, colour) in enumerate(_facts(seen)):
        draw.text((2, 2 + row * _LINE_HEIGHT), text, colour, font)
    return np.asarray(chart), np.asarray(numbers)


def _facts(seen: Glance) -> Iterator[tuple[str, _Colour]]:
    """Yield at most ten lines with their colours, which are those of the chart."""
    yield f"step {seen.step:,} of {seen.num_steps:,}, {seen.share_done:.1%} done", _BLACK
    if seen.stage:
        yield f"stage {seen.stage}", _BLACK
    yield _track_text("loss", seen.loss), LOSS
    yield _track_text("held-out", seen.held_out), HELD_OUT
    if seen.uniform_guess is not None:
        yield f"unigram entropy {number(seen.unigram_entropy, '.3f')}", _GREY
        yield f"uniform guess {number(seen.uniform_guess, '.3f')}", _GREY
    yield f"rate {number(seen.lr, '.2e')}   {number(seen.tokens_per_s, ',.0f')} tokens/s", _BLACK
    yield f"epochs {seen.epochs_text}", _BLACK
    for noun, steps, colour in (
        ("restart", seen.restarts, RESTART),
        ("rewind", seen.rewinds, REWIND),
    ):
        last = f", the last at step {steps[-1]:,}" if steps else ""
        yield f"{counted(len(steps), noun)}{last}", colour


def _track_text(name: str, track: LossTrack | None) -> str:
    if track is None:
        return f"{name}: none yet"
    ends = f"first {number(track.first, '.3f')}   best {number(track.best, '.3f')}"
    return f"{name} {number(track.newest, '.4f')}   {ends}"


def _series(lines: Iterable[Record], kind: str) -> list[_Point]:
    """Return (step, loss), means of neighbours where there are more than a chart can show."""
    points = [
        (float(line["step"]), float(line["loss"]))
        for line in lines
        if line["kind"] == kind and line.get("loss") is not None
    ]
    each = -(-len(points) // _MOST_POINTS)
    if each < 2:
        return points
    parts = (points[first : first + each] for first in range(0, len(points), each))
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


class _Chart:
    """The losses by step."""

    def __init__(
        self,
        draw: ImageDraw.ImageDraw,
        seen: Glance,
        train: Sequence[_Point],
        held_out: Sequence[_Point],
    ) -> None:
        self._draw, self._seen = draw, seen
        self._train, self._held_out = train, held_out
        self._last_step = max(1, seen.step)
        levels = [level for level in (seen.unigram_entropy, seen.uniform_guess) if level]
        losses = [loss for _, loss in (*train, *held_out)]
        high: float = max([*losses, *levels], default=1.0)
        if seen.uniform_guess is not None:
            high = min(high, _ABOVE_GUESS * seen.uniform_guess)
        low = min([*losses, *levels], default=0.0)
        margin = max(_LEAST_RANGE, (high - low) * 0.05)
        self._low, self._high = low - margin, high + margin

    def draw(self) -> None:
        """Draw a legend, axes, levels, marks and both lines, the lines on top."""
        self._legend()
        self._axes()
        self._level(self._seen.unigram_entropy, dash=6)
        self._level(self._seen.uniform_guess, dash=2)
        for steps, colour in (
            (self._seen.stage_steps, _STAGE),
            (self._seen.restarts, RESTART),
            (self._seen.rewinds, REWIND),
        ):
            for step in steps:
                x = self._x(step)
                self._draw.line((x, _TOP, x, _BOTTOM), colour, 2)
        self._line(self._train, LOSS)
        self._line(self._held_out, HELD_OUT)
        for seen_at, loss in self._held_out[-_MOST_POINTS // 8 :]:
            centre = self._x(seen_at), self._y(loss)
            self._draw.circle(centre, 2, HELD_OUT)

    def _x(self, step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / self._last_step

    def _y(self, loss: float) -> float:
        share = (loss - self._low) / (self._high - self._low)
        return _BOTTOM - (_BOTTOM - _TOP) * min(1.0, max(0.0, share))

    def _legend(self) -> None:
        font = ImageFont.load_default(_SMALL)
        names: list[list[tuple[str, _Colour]]] = [
            [("loss", LOSS), ("held-out loss", HELD_OUT)],
            [("restart", RESTART), ("rewind", REWIND), ("stage", _GREY)],
        ]
        if self._seen.uniform_guess is not None:
            names[0] += [("- - unigram entropy", _GREY), (". . uniform guess", _GREY)]
        for row, parts in enumerate(names):
            x = 2.0
            for text, colour in parts:
                self._draw.text((x, row * (_SMALL + 4)), text, colour, font)
                x += self._draw.textlength(f"{text}  ", font)

    def _axes(self) -> None:
        font = ImageFont.load_default(_SMALL)
        right = _WIDTH - _RIGHT
        self._draw.rectangle((_LEFT, _TOP, right, _BOTTOM), outline=_STAGE)
        for share in np.linspace(0, 1, _TICKS).tolist():
            loss = self._low + share * (self._high - self._low)
            self._draw.text((_LEFT - 4, self._y(loss)), f"{loss:.2f}", _GREY, font, anchor="rm")
            step = round(share * self._last_step)
            end = "lt" if share == 0 else "rt" if share == 1 else "mt"
            self._draw.text((self._x(step), _BOTTOM + 4), f"{step:,}", _GREY, font, anchor=end)

    def _level(self, loss: float | None, *, dash: int) -> None:
        if loss is None or math.isnan(loss):
            return
        y = self._y(loss)
        for x in range(_LEFT, _WIDTH - _RIGHT, 2 * dash):
            self._draw.line((x, y, x + dash - 1, y), _GREY, 1)

    def _line(self, points: Sequence[_Point], colour: _Colour) -> None:
        for (step, loss), (next_step, next_loss) in pairwise(points):
            ends = self._x(step), self._y(loss), self._x(next_step), self._y(next_loss)
            self._draw.line(ends, colour, 2)
