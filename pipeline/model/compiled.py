"""Layers compiled by torch.compile, once for all layers of a model.

The first dimension of activations, sequences or tokens, is symbolic from the start; lengths of
sequences become symbolic when a second one comes.
"""

import logging
import shutil
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.model.layers import SharedInputs, run_layer

logger = logging.getLogger(__name__)

# First or later layer, training or evaluation, the first length or any other, for two encoders.
_MANY_GRAPHS = 16
# More than all combinations of first or later layer, training or evaluation, one or more sequences
# and lengths, with or without alpha. torch's own limit, 8, is too low, and exceeding it an error.
_MOST_GRAPHS = 64


class CompiledLayer:
    """`run_layer`, compiled at its first call in each mode."""

    def __init__(self, **options: Any) -> None:
        """Take options of `torch.compile`, such as its mode."""
        torch._dynamo.config.recompile_limit = _MOST_GRAPHS
        # A graph of one layer with its weights as inputs: the time to compile does not grow with
        # the depth. Modules are not wrapped, so parameters keep their names.
        self._run = torch.compile(run_layer, fullgraph=True, **options)
        self._has_warned = False

    def __call__(
        self,
        layer: nn.Module,
        x: Tensor,
        shared: SharedInputs,
        carry_BNSS: Tensor | None,
        num_summed: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a layer; see `Layer.forward`."""
        inputs = [x, *shared.layout, *(shared.tables or ()), shared.query_scale]
        for each in inputs:
            if isinstance(each, Tensor):
                torch._dynamo.maybe_mark_dynamic(each, 0)
        if carry_BNSS is not None:  # the fused kernels' is (N, T, W)
            torch._dynamo.maybe_mark_dynamic(carry_BNSS, 1 if shared.fused else 0)
        found = self._run(layer, x, shared, carry_BNSS, num_summed)
        if not self._has_warned and num_graphs() > _MANY_GRAPHS:
            self._has_warned = True
            text = (
                "layers were compiled %d times, expected %d at most: each time takes seconds, and "
                "%d of one layer are an error; TORCH_LOGS=recompiles says why, "
                "train.compile=false avoids it"
            )
            logger.warning(text, num_graphs(), _MANY_GRAPHS, _MOST_GRAPHS)
        return found


def num_graphs() -> int:
    """Return how many graphs this process has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def require_compiler(device: torch.device) -> None:
    """Check early that a device has everything that torch.compile needs.

    Raises:
        ConfigError: there is no C++ compiler, or no Triton for a GPU.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type == "cuda" and not has_triton():
        raise ConfigError(
            "train.compile=true needs Triton, which does not import here or does not know this "
            "GPU; install the triton that belongs to this torch, or set train.compile=false"
        )
    try:
        path = get_cpp_compiler()
    except InvalidCxxCompiler:
        path = ""
    if not shutil.which(path):
        raise ConfigError(
            "train.compile=true needs a C++ compiler, and none was found: torch looks for the "
            "program that CXX names, or g++; install one on every node, or set train.compile=false"
        )
