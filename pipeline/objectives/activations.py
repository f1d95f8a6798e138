"""Counts the bytes that autograd keeps from a forward pass to its backward pass.

`python -m pipeline.objectives.activations` reads passes as JSON from standard input and prints the
bytes of each by group: it is the half of `pipeline.model.cost.activation_bytes` that needs torch.
The real model runs, with the objective's loss, on tensors that have shapes but no memory (device
"meta"), and a hook sees every tensor that autograd saves. A storage counts once, whatever number of
views is kept; parameters do not count.

What runs is what a GPU runs. Fused kernels give the shapes of their results themselves. Three
things go another way without a GPU, and are sent the GPU's way here: the mask of dropout (one byte
a value), attention over rows with a mask (torch's memory-efficient kernel, which keeps the mask in
the dtype of the queries in each layer), and attention over documents (flash). The fused loss keeps
the same gradients as the plain one, which runs in its place.

Not seen: temporary memory, in backward mainly the gradient of the carried scores (T * N * S values
in fp32), in the loss the logits of a chunk of rows; and the allocator's rounding.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipeline.config.model import ModelConfig
from pipeline.config.objective import MLM, ObjectiveConfig, generator_of
from pipeline.data.loader import MicroBatch
from pipeline.kernels.choose import Choice, padded_width, residual_norm_obstacle
from pipeline.model.cost import TrainingPass
from pipeline.model.encoder import EncoderModel
from pipeline.objectives.choose import make_objective

_META = torch.device("meta")
_GENERATOR, _INPUTS, _REST = "generator", "layer inputs", "head and loss"
_ORDER = (
    "embeddings",
    _INPUTS,
    "attention",
    "carried scores",
    "feed-forward",
    "norms and residuals",
    _GENERATOR,
    _REST,
    "discriminator head",
    "boundary head",
    "pair head",
)


def activation_bytes(given: TrainingPass) -> dict[str, int]:
    """Count the bytes of a pass by group; see `pipeline.model.cost.activation_bytes`.

    All layers keep the same, so passes of one and of two layers say what any number keeps.
    """
    config, group_size = given.config, given.checkpoint_layers
    num_layers = config.num_layers
    depth = dict.fromkeys(_ORDER, num_layers)
    depth[_GENERATOR] = generator_of(config, given.objective).num_layers
    if group_size is None:
        kept = _at(depth, *_one_and_two_layers(given))
    else:
        inputs = _one_and_two_layers(replace(given, checkpoint_layers=1))
        kept = _at({name: -(-depth[name] // group_size) for name in _ORDER}, *inputs)
        # Backward computes one group of the encoder again; a generator's is no larger, and is
        # computed after the encoder's are freed.
        group = replace(given, objective=MLM)
        inputs_of_group, _ = _one_and_two_layers(replace(group, checkpoint_layers=1))
        whole = _one_and_two_layers(replace(group, checkpoint_layers=None))
        kept.update(_at(dict.fromkeys(_ORDER, min(group_size, num_layers)), *whole))
        kept.subtract(inputs_of_group)
    return {name: kept[name] for name in _ORDER} | {"total": sum(kept.values())}


def _at(
    depth: Mapping[str, int], first: Mapping[str, int], second: Mapping[str, int]
) -> Counter[str]:
    """Extrapolate what one and two layers keep to the number of layers of each group."""
    return Counter(
        {name: first[name] + (depth[name] - 1) * (second[name] - first[name]) for name in _ORDER}
    )


def _one_and_two_layers(given: TrainingPass) -> tuple[Counter[str], Counter[str]]:
    # The generator, whose share of the layers may be any, gets as many here.
    objective = replace(given.objective, generator_layers=1.0)
    one, two = (
        _kept(replace(given, objective=objective, config=replace(given.config, num_layers=number)))
        for number in (1, 2)
    )
    return one, two


def _kept(given: TrainingPass) -> Counter[str]:
    """Run a pass; return the bytes that it keeps by group."""
    objective = make_objective(given.objective)
    with _AsOnGpu(), _META:
        model = objective.make_model(given.config).train()
        model.to(torch.bfloat16 if given.precision == "bf16" else torch.float32)
        for encoder in model.encoders:
            # An encoder keeps its alpha on the CPU, whatever the default device is.
            encoder.alpha = torch.ones(())
            encoder.checkpoint_activations(given.checkpoint_layers)
            if given.fused.attention:
                encoder.fuse_attention()
            # A narrower encoder may have a width that the kernel does not take.
            if given.fused.residual_norm and residual_norm_obstacle(encoder.config) is None:
                encoder.fuse_residual_norms()
        batch = _batch(given, list(objective.losses))
        with _groups_of_saved(model, given) as kept:
            sums = objective(model, batch)
            # The graph holds what is kept, so that no two storages have the same number.
            _ = sum(sums[name].total for name in objective.losses)
    return kept


class _Inputs(dict[str, Tensor]):
    """What an objective asks for, made when it asks: numbers of tokens, of pairs one a row."""

    def __init__(self, given: TrainingPass) -> None:
        super().__init__()
        self._rows = given.rows
        self._num_masked = round(given.masked_share * given.rows * given.seq_len)

    def __missing__(self, name: str) -> Tensor:
        number = self._rows if name.startswith("pair_") else self._num_masked
        dtype = torch.float32 if name == "uniform" else torch.int64
        return self.setdefault(name, torch.empty(number, dtype=dtype))


def _batch(given: TrainingPass, losses: list[str]) -> MicroBatch:
    shape = given.rows, given.seq_len
    return MicroBatch(
        torch.empty(shape, dtype=torch.int64),
        torch.empty(shape, dtype=torch.int32),
        torch.empty(shape, dtype=torch.int64),
        None,
        torch.empty(given.rows + 1, dtype=torch.int32),
        _Inputs(given),
        dict.fromkeys(losses, 1.0),
        {},
        given.rows * given.seq_len,
        0,
    )


class _AsOnGpu(TorchFunctionMode):
    """Sends the calls whose shapes differ without a GPU the GPU's way."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            # Nothing to fill; on this device torch would import its compiler first, 2 s.
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _masked_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(x: Tensor, p: float, training: bool, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, dropout_p: float, scale: float
) -> Tensor:
    bias = torch.empty_like(attn_mask, dtype=q.dtype).expand(-1, q.shape[1], -1, -1)
    out, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, dropout_p, scale=scale
    )
    return out  # type: ignore[no-any-return]


@contextmanager
def _groups_of_saved(model: EncoderModel, given: TrainingPass) -> Iterator[Counter[str]]:
    """Yield what passes in this block keep, filled at its end: bytes by group.

    What several groups keep counts in the last: what a fused norm keeps, which is its output, is
    the input of the linear layer behind it, and counts there as it does with other norms.
    Scores are told from other things that attention keeps by their shape: with as many slots as a
    head has numbers, queries and keys count as scores, which changes no total.
    """
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    group_of: dict[int, tuple[str, int]] = {}
    inside = [_REST]
    keys = {given.seq_len, padded_width(given.seq_len)}
    queries = {given.seq_len, given.rows * given.seq_len}
    carries = given.config.score_residual != "none"
    kept: Counter[str] = Counter()

    def pack(tensor: Tensor) -> Tensor:
        storage, group = tensor.untyped_storage(), inside[-1]
        if storage._cdata not in own:
            is_square = tensor.ndim > 1 and tensor.shape[-1] in keys and tensor.shape[-2] in queries
            if group == "attention" and carries and is_square:
                group = "carried scores"
            group_of[storage._cdata] = group, storage.nbytes()
        return tensor

    def enter(group: str) -> Any:
        return lambda *_: inside.append(group)

    for name, module in model.named_modules():
        module.register_forward_pre_hook(enter(_group(name, given.objective)))
        module.register_forward_hook(lambda *_: inside.pop() and None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
    for group, num_bytes in group_of.values():
        kept[group] += num_bytes


def _group(name: str, objective: ObjectiveConfig) -> str:
    """Return the group of what a module keeps, by the module's name."""
    parts = name.split(".")
    if parts[0] == "objective":
        own = {"generator": _GENERATOR, "discriminator": "discriminator head"}
        heads = "pair head" if objective.pairs else "boundary head"
        return own.get(parts[1], heads) if len(parts) > 1 else heads
    if parts[0] != "encoder":
        return _REST
    if parts[1:] and parts[1] in ("layers", "final_norm"):
        part = parts[3] if len(parts) > 3 else ""
        return {"attention": "attention", "feed_forward": "feed-forward"}.get(
            part, "norms and residuals"
        )
    # An encoder itself keeps the inputs of groups of layers alone.
    return "embeddings" if parts[1:] else _INPUTS


def _read(given: dict[str, Any]) -> TrainingPass:
    parts = {
        "config": ModelConfig(**given["config"]),
        "objective": ObjectiveConfig(**given["objective"]),
        "fused": Choice(*given["fused"]),
    }
    return TrainingPass(**(given | parts))


if __name__ == "__main__":
    counted = [activation_bytes(_read(each)) for each in json.load(sys.stdin)]
    sys.stdout.write(json.dumps(counted))
