"""Forms of RealFormer's score residual that the model does not have, laid over its `sum`.

All are Z_l = own q k^T / sqrt(d) + keep Z_(l-1), l from 0, and attention is softmax(Z_l). Hooks
scale the queries and the carried scores on their way into each layer, so that the model needs no
switch for what was tried.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.model.encoder import MaskedLanguageModel


class Form(NamedTuple):
    """One form; N layers."""

    meaning: str
    own: Callable[[int, int], float] = lambda layer, layers: 1.0
    """(l, N): weight of layer l's own scores."""
    keep: Callable[[int, int], float] = lambda layer, layers: 1.0
    """(l, N): weight of the carried ones; layer 0 has none."""
    gated: bool = False
    """`keep` is times a learned number of the layer, 0 at first."""
    warmed: bool = False
    """`keep` is times the residual's alpha."""
    branches_warmed: bool = True
    """Whether alpha scales the residual branches, too."""
    detached: bool = False
    """The scores are carried without their gradient."""


FORMS = {
    "decay 0.5": Form("own scores + half of the carried", keep=lambda layer, layers: 0.5),
    "decay 0.8": Form("own scores + 0.8 of the carried", keep=lambda layer, layers: 0.8),
    "ema 0.7": Form(
        "0.3 own + 0.7 carried, all own in layer 0",
        own=lambda layer, layers: 0.3 if layer else 1.0, keep=lambda layer, layers: 0.7,
    ),
    "rsqrt": Form(
        "sum / sqrt(l + 1): the variance of one layer's scores, if they are independent",
        own=lambda layer, layers: (layer + 1) ** -0.5,
        keep=lambda layer, layers: math.sqrt(layer / (layer + 1)),
    ),
    "sum by N": Form("sum / N in all layers", own=lambda layer, layers: 1 / layers),
    "gate": Form("own scores + g times the carried, g learned by layer from 0", gated=True),
    "alpha": Form("own scores + alpha times the carried", warmed=True),
    "alpha alone": Form(
        "own scores + alpha times the carried; branches have alpha 1", warmed=True,
        branches_warmed=False,
    ),
    "detached": Form("sum, carried without its gradient", detached=True),
}  # fmt: skip


def use_form(model: MaskedLanguageModel, name: str, alpha: Tensor) -> None:
    """Gives a model with `score_residual: sum` another form; gates become its parameters.

    Args:
        model: changed in place.
        name: of `FORMS`.
        alpha: 0-dimensional; the schedule changes it in place.
    """
    layers = model.encoder.layers
    for layer in layers:
        if FORMS[name].gated:
            layer.attention.gate = nn.Parameter(torch.zeros(1))
        layer.attention.register_forward_pre_hook(_hook(FORMS[name], len(layers), alpha))
        if not FORMS[name].branches_warmed:
            layer.register_forward_pre_hook(_without_alpha)


def _hook(form: Form, layers: int, alpha: Tensor) -> Callable[[nn.Module, Any], Any]:
    def scale(attention: nn.Module, inputs: Any) -> Any:
        x, shared, carry_BNSS, index = inputs
        shared = shared._replace(query_scale=shared.query_scale * form.own(index, layers))
        if carry_BNSS is not None:
            keep = form.keep(index, layers) * (alpha if form.warmed else 1.0)
            keep = keep * attention.gate if form.gated else keep
            carry_BNSS = keep * (carry_BNSS.detach() if form.detached else carry_BNSS)
        return x, shared, carry_BNSS, index

    return scale


def _without_alpha(layer: nn.Module, inputs: Any) -> Any:
    x, shared, carry_BNSS, index = inputs
    return x, shared._replace(alpha=torch.ones_like(shared.alpha)), carry_BNSS, index
