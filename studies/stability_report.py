"""What `studies.stability` found, as tables and curves."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.inspect.curves import Line, Panel, draw
from studies.carry_forms import FORMS
from studies.reading import STUCK_NATS

_SHOWN_NATS = 0.5
"""Curves begin this much above the unigram entropy."""

_LIMITS = """\
What this cannot say: the models are narrow, the text is 9 M tokens of documentation, and a trial
ends after a few hundred updates, when the models have begun to use context. It tells which arms
converge and which stay at the unigram entropy; differences of a few hundredths of a nat between
converging arms are within what another seed changes."""


@dataclass(frozen=True)
class Finished:
    """A finished trial; `found` has the fields of `stability_trial.Found`."""

    size: str
    method: str
    carry: str
    seed: int
    found: dict[str, Any]

    @property
    def loss(self) -> float:
        """Held-out, nats a masked token."""
        return float(self.found["eval_loss"])


def _order(trials: Sequence[Finished], field: str) -> list[str]:
    return list(dict.fromkeys(getattr(trial, field) for trial in trials))


def _of(trials: Sequence[Finished], **wanted: str) -> list[Finished]:
    return [t for t in trials if all(getattr(t, name) == value for name, value in wanted.items())]


def summary(trials: Sequence[Finished]) -> dict[str, Any]:
    """Held-out losses by arm and seed."""
    found: dict[str, Any] = {}
    for trial in trials:
        arm = f"{trial.size} {trial.method} {trial.carry}"
        found.setdefault(arm, {})[str(trial.seed)] = round(trial.loss, 4)
    return found


def curves(trials: Sequence[Finished], size: str) -> str:
    """Training losses of one size as SVG: a panel for each carry, a colour for each method.

    Of the first seed alone: all of them then saw the same text, and their noise is the same.
    """
    mine = [trial for trial in _of(trials, size=size) if trial.seed == 1]
    entropy = mine[0].found["unigram_entropy"]
    carries = [carry for carry in _order(mine, "carry") if carry not in FORMS]
    panels = [
        Panel(
            f"score residual: {carry}",
            [Line(trial.method, trial.found["curve"]) for trial in _of(mine, carry=carry)],
            "updates",
        )
        for carry in carries
    ]
    forms = [trial for trial in mine if trial.carry in FORMS]
    if forms:
        lines = [Line(f"{t.carry}, {t.method}", t.found["curve"]) for t in forms]
        panels.append(Panel("other forms", lines, "updates"))
    return draw(
        panels, y_name="training loss, nats", top=entropy + _SHOWN_NATS,
        dotted={"unigram entropy": entropy},
    )  # fmt: skip


def table(trials: Sequence[Finished], heading: str) -> str:
    """All figures as Markdown."""
    lines = ["# Stability of deep Post-LN", "", heading, "", _LIMITS, ""]
    for size in _order(trials, "size"):
        mine = _of(trials, size=size)
        lines += [f"## {size}", "", *_losses(mine), "", *_differences(mine), *_layers(mine)]
    return "\n".join(lines) + "\n"


def _losses(trials: Sequence[Finished]) -> list[str]:
    entropy = trials[0].found["unigram_entropy"]
    limit = entropy - STUCK_NATS
    carries = [carry for carry in _order(trials, "carry") if carry not in FORMS]
    lines = [
        f"Held-out loss, nats; mean +- standard deviation (seeds). The unigram entropy is "
        f"{entropy:.2f}; *italics*: above {limit:.2f}, stuck.", "",
        f"| method | {' | '.join(carries)} |", "|---" * (len(carries) + 1) + "|",
    ]  # fmt: skip
    for method in _order(trials, "method"):
        cells = [_cell(_of(trials, method=method, carry=carry), limit) for carry in carries]
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    forms = [t for t in trials if t.carry in FORMS]
    if forms:
        lines += ["", "Forms that the model does not have (`studies/carry_forms.py`):", "",
                  "| form | method | loss |", "|---" * 3 + "|"]  # fmt: skip
    for form in _order(forms, "carry"):
        for method in _order(_of(forms, carry=form), "method"):
            cell = _cell(_of(forms, carry=form, method=method), limit)
            lines.append(f"| {form}: {FORMS[form].meaning} | {method} | {cell} |")
    return lines


def _cell(trials: Sequence[Finished], limit: float) -> str:
    if not trials:
        return ""
    losses = [trial.loss for trial in trials]
    mean = statistics.mean(losses)
    text = f"{mean:.3f}"
    if len(losses) > 1:
        text += f" +- {statistics.stdev(losses):.3f} ({len(losses)})"
    return f"*{text}*" if mean > limit else text


def _differences(trials: Sequence[Finished]) -> list[str]:
    """Carried minus not carried, seed by seed, where there are several seeds."""
    lines = []
    for method in _order(trials, "method"):
        plain = {t.seed: t.loss for t in _of(trials, method=method, carry="none")}
        for carry in _order(trials, "carry"):
            pairs = [
                t.loss - plain[t.seed]
                for t in _of(trials, method=method, carry=carry) if t.seed in plain
            ]  # fmt: skip
            if carry != "none" and len(pairs) > 1:
                each = ", ".join(f"{pair:+.3f}" for pair in pairs)
                lines.append(f"| {method} | {carry} | {statistics.mean(pairs):+.3f} | {each} |")
    if not lines:
        return []
    head = "| method | carry | mean | by seed |"
    return ["Loss minus that of `none` with the same seed, so with the same text and masks:", "",
            head, "|---" * 4 + "|", *lines, ""]  # fmt: skip


def _layers(trials: Sequence[Finished]) -> list[str]:
    """Lowest and highest layer of each arm's first seed."""
    lines = [
        "Lowest .. highest layer, at the start -> at the end (of gradients: in the last tenth). "
        "Deviation of the softmax's input over a row's keys; entropy over log(keys); cosine "
        "between the hidden states of two tokens, first after the embeddings; gradient norm of the "
        "query and key matrices, and of the layer's others.", "",
        "| method | carry | logit std | attention entropy | cosine of tokens | gradient: q, k "
        "| others |", "|---" * 7 + "|",
    ]  # fmt: skip
    for trial in trials:
        if trial.seed != min(t.seed for t in trials):
            continue
        looks = trial.found["looks"]
        cells = [
            f"{_ends(looks[0][name])} -> {_ends(looks[-1][name])}"
            for name in ("logit_std", "entropy", "cosine")
        ]
        cells += [_ends(looks[-2][name]) for name in ("gradient_query_key", "gradient_other")]
        lines.append(f"| {trial.method} | {trial.carry} | {' | '.join(cells)} |")
    return [*lines, ""]


def _ends(values: list[float]) -> str:
    return f"{values[0]:.2g} .. {values[-1]:.2g}"
