"""Our Triton kernels for GPUs that are not there: registers, spills, shared memory, blocks.

    python -m benchmarks.tiles [--capability 80 90 100] [--longest 512 128] [--dropout 0 0.1]

Compiles each kernel in each of its tiles (`pipeline/kernels/tiles.py`) for bf16 and heads of 64,
with whichever Triton is importable, and prints a table; about two seconds a row. "Spilled" counts
the instructions that store and load registers that a thread has no room for. "Blocks" are those
that a multiprocessor holds at a time by registers, shared memory and warps; on sm_100 its memory
for tensors may allow fewer.

`fastest` times the same tiles on the GPU that there is; `benchmarks.gpu_checks` calls it.
"""

import argparse
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipeline.kernels import carried_triton, rows_triton
from pipeline.kernels.carried_triton import Numbers
from pipeline.kernels.choose import padded_width
from pipeline.kernels.common_triton import Launch
from pipeline.kernels.tiles import KERNELS, Kernel, Shape, Target, Tile, candidates, fixed, tile_of
from pipeline.kernels.turn_triton import turn_launch

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
         torch.int32: "*i32", torch.int64: "*i64"}  # fmt: skip
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# ptxas prints for each function; these are SASS instructions.
COUNTED = {"local stores": r"\bSTL", "local loads": r"\bLDL", "narrow stores": r"\bSTG\.E\.U?16",
           "narrow loads": r"\bLDG\.E\.U?16", "wide stores": r"\bSTG\.E\.128",
           "wide loads": r"\b(LDG\.E\.128|LDGSTS\.E\.(BYPASS\.)?(\w+\.)*128)",
           "HGMMA": r"\bHGMMA", "HMMA": r"\bHMMA", "UTCHMMA": r"\bUTC\w*MMA"}  # fmt: skip
SHARED_KIB = {80: 163, 90: 227, 100: 227}
"""What the blocks of a multiprocessor have together, by compute capability."""
_REGISTERS, _WARPS = 65_536, 64
_ROUNDS = 12


def compiled(launch: Launch, capability: int) -> Any:
    """As `Launch.run` would have it: what is divisible by 16 is known to be."""
    signature, constants, attributes = {}, dict(launch.constants), {}
    for place, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments.get(name)
        signature[name] = "constexpr"
        if value is None:
            constants.setdefault(name, None)
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int) and value == 1:
            constants[name] = 1
        else:
            tensor = isinstance(value, Tensor)
            signature[name] = TYPES[value.dtype] if tensor else "i32"
            if tensor or value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def found_in(binary: Any) -> dict[str, int]:
    """Counts of instructions, registers of a thread and bytes of shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        code, usage = (
            subprocess.run([TOOL, option, file.name], check=True, capture_output=True, text=True)
            for option in ("-sass", "-res-usage")
        )
    counts = {name: len(re.findall(pattern, code.stdout)) for name, pattern in COUNTED.items()}
    registers = re.search(r"REG:(\d+)", usage.stdout + usage.stderr)
    assert registers, usage
    return counts | {"registers": int(registers[1]), "shared": binary.metadata.shared}


def blocks(found: dict[str, int], warps: int, capability: int) -> int:
    """Blocks that a multiprocessor holds at a time, by what `found_in` returns."""
    # Registers are given to a warp by 256, shared memory to a block by KiB, one of them its own.
    of_warp = -(-found["registers"] * 32 // 256) * 256
    of_block = -(-found["shared"] // 1024) + 1
    return min(_REGISTERS // (of_warp * warps), SHARED_KIB[capability] // of_block, _WARPS // warps)


@dataclass(frozen=True)
class Layer:
    """Arguments of the kernels of carried scores in a layer in the middle of a model."""

    tensors: dict[str, Tensor | None]
    numbers: Numbers

    @property
    def shape(self) -> Shape:
        """What its tiles depend on."""
        scores, q = self.tensors["scores"], self.tensors["q"]
        assert scores is not None
        assert q is not None
        return Shape(scores.shape[-1], q.shape[-1], self.numbers.dropout > 0)

    @classmethod
    def make(
        cls, longest: int, head_size: int, dropout: float, *, tokens: int, heads: int = 12,
        dtype: torch.dtype = torch.bfloat16, device: str = "meta",
    ) -> "Layer":  # fmt: skip
        """Random on a device, or without memory on "meta"; full windows, turned, averaged."""

        def new(*shape: int, of: torch.dtype = dtype) -> Tensor:
            if device == "meta" or not of.is_floating_point:
                return torch.empty(shape, dtype=of, device=device)
            return torch.randn(shape, device=device).to(of)

        wide, width = dtype == torch.float32, padded_width(longest)
        qkv, turned = new(tokens, 3, heads, head_size), new(tokens, 2, heads, head_size)
        (q, k), (dq, dk, dv) = turned.unbind(1), torch.empty_like(qkv).unbind(1)
        of_scores, of_gradient = (torch.float32,) * 2 if wide else (torch.float16, torch.bfloat16)
        angles = [new(tokens, head_size // 2, of=torch.float32) for _ in range(2)]
        start = torch.arange(tokens, dtype=torch.int32, device=device) // longest * longest
        spans = torch.stack([start, start + longest] * 2, 1)
        bounds = torch.arange(0, tokens + 1, longest, dtype=torch.int32, device=device)
        seed = torch.ones(1, dtype=torch.int64, device=device) if dropout else None
        scores = [new(heads, tokens, width, of=of_scores) for _ in range(2)]
        gradients = [new(heads, tokens, width, of=of_gradient) for _ in range(2)]
        tensors = {
            "qkv": qkv, "turned": turned, "q": q, "k": k, "v": qkv[:, 2], "cos": angles[0],
            "sin": angles[1], "token_scale": None, "carry": scores[0], "scores": scores[1],
            "out": new(tokens, heads, head_size), "lse": new(heads, tokens, of=torch.float32),
            "spans": spans, "bounds": bounds, "seed": seed,
            "num_summed": torch.full((), 2.0, device=device),
            "d_out": new(tokens, heads, head_size), "d_scores": gradients[0], "dq": dq, "dk": dk,
            "dv": dv, "d_carry": gradients[1],
        }  # fmt: skip
        return cls(tensors, Numbers(longest, head_size**-0.5, dropout))

    def launches(self, gpu: Target) -> Iterator[Launch]:
        """All of a forward and a backward pass."""
        yield turn_launch(self.tensors)
        yield carried_triton.forward(self.tensors, self.numbers, gpu)
        yield from carried_triton.backward(self.tensors, self.numbers, gpu)

    def launch(self, kernel: Kernel, tile: Tile, gpu: Target) -> Launch:
        """One of them, in a tile."""
        with ExitStack() as stack:
            if kernel in ("backward_keys", "backward_queries"):
                stack.enter_context(fixed("backward_window", None))
            stack.enter_context(fixed(kernel, tile))
            return next(one for one in self.launches(gpu) if name_of(one) == kernel)


def name_of(launch: Launch) -> str:
    """Name of its kernel."""
    return str(launch.kernel.fn.__name__).removesuffix("_kernel")


def norm(size: int, dropout: float, dtype: torch.dtype) -> Iterator[Launch]:
    """Residual and norm, forward and backward, over rows that have no memory."""

    def new(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    rows = new(4096, size, of=dtype)
    shared = {"y": rows, "rstd": new(4096), "alpha": new(),
              "seed": new(1, of=torch.int64) if dropout else None}  # fmt: skip
    yield rows_triton.forward({**shared, "x": rows, "update": rows}, 1.0, 1e-12, dropout)
    gradients = {"d_y": rows, "d_x": rows, "d_update": rows}
    yield rows_triton.backward({**shared, **gradients}, 1.0, dropout)


def cross_entropy(size: int) -> Launch:
    """Loss and gradient over a vocabulary, of logits that have no memory."""
    logits = torch.empty(8, size, dtype=torch.bfloat16, device="meta")
    targets = torch.empty(8, dtype=torch.int64, device="meta")
    of_rows = torch.empty(8, device="meta")
    return rows_triton.cross_entropy(logits, targets, of_rows, of_rows, True)


def _others(dropout: float) -> Iterator[Launch]:
    """Kernels without a choice of tiles, of RoFormerV2 base and a vocabulary of 50,000."""
    layer = Layer.make(512, 64, dropout, tokens=4096)
    launches = {name_of(one): one for one in layer.launches(Target((9, 0)))}
    yield from (launches["turn"], launches["delta"], *norm(768, dropout, torch.bfloat16))
    yield cross_entropy(50_000)


def rows(capability: int, lengths: list[int], dropout: float) -> Iterator[str]:
    """Lines of the table for one GPU."""
    gpu = Target((capability // 10, capability % 10))
    for longest in lengths:
        layer = Layer.make(longest, 64, dropout, tokens=8 * longest)
        for kernel in KERNELS:
            taken = tile_of(kernel, layer.shape, gpu)
            for tile in candidates(kernel, layer.shape, gpu):
                if tile is not None:
                    what = f"{kernel} {longest}: {tile}{' (taken)' if tile == taken else ''}"
                    yield _row(layer.launch(kernel, tile, gpu), what, capability, dropout)
    for launch in _others(dropout):
        yield _row(launch, f"{name_of(launch)}: {launch.warps} warps", capability, dropout)


def _row(launch: Launch, what: str, capability: int, dropout: float) -> str:
    found = found_in(compiled(launch, capability))
    products = found["HGMMA"] + found["UTCHMMA"]
    cells = (
        what, dropout, found["registers"],
        found["local stores"] + found["local loads"], f"{found['shared'] / 1024:.0f}",
        blocks(found, launch.warps, capability), f"{products} + {found['HMMA']}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def fastest(
    layer: Layer, gpu: Target, deadline: float, limit: float
) -> Iterator[tuple[Kernel, Tile | None, dict[str, float]]]:
    """Time the tiles of a layer's kernels, and yield the fastest of each with milliseconds of all.

    A tile must give what the first one gives, and the window's what the others give, within `limit`
    (relative Frobenius error). Those that are wrong (infinite milliseconds) or do not start (NaN)
    are not taken. None: the other kernels are faster than the window's. `deadline` is of
    `time.monotonic`; what would begin after it is left out.
    """
    apart_ms = 0.0
    with fixed("backward_window", None):
        delta = next(one for one in layer.launches(gpu) if name_of(one) == "delta")
        arguments, constants = dict(delta.arguments), delta.constants
    for one in layer.launches(gpu):  # what the kernels read of each other is there
        one.run()
    for kernel in KERNELS:
        wanted: dict[str, Tensor] | None = None
        if kernel == "backward_window" and apart_ms:
            wanted = _results(kernel, layer)
        ms: dict[str, float] = {}
        tiles: dict[str, Tile] = {}
        for tile in candidates(kernel, layer.shape, gpu):
            if tile is None or time.monotonic() > deadline:
                continue
            launch = layer.launch(kernel, tile, gpu)
            if "delta" in launch.arguments:
                launch.arguments["delta"] = arguments["delta"]
                Launch(delta.kernel, delta.num_programs, arguments, constants, 4, 1).run()
            try:
                launch.run()
            except Exception as error:  # noqa: BLE001 - such as more shared memory than there is
                ms[f"{tile}: {type(error).__name__}"] = math.nan
                continue
            found = _results(kernel, layer)
            wanted = found if wanted is None else wanted
            worst = max(_error(found[name], wanted[name]) for name in wanted)
            if not worst <= limit:
                ms[f"{tile} is wrong by {worst:.1e}"] = math.inf
                continue
            tiles[str(tile)] = tile
            ms[str(tile)] = _median_ms(launch.run)
        if not tiles:
            continue
        best = min(tiles, key=lambda name: ms[name])
        if kernel in ("backward_keys", "backward_queries"):
            apart_ms += ms[best]
        if kernel == "backward_window":
            ms["apart"] = apart_ms + _median_ms(delta.run)
            if ms["apart"] < ms[best]:
                yield kernel, None, ms
                continue
        yield kernel, tiles[best], ms


_WRITES: dict[Kernel, tuple[str, ...]] = {
    "forward": ("out", "scores", "lse"), "backward_keys": ("dk", "dv", "d_carry"),
    "backward_queries": ("dq",), "backward_window": ("dq", "dk", "dv", "d_carry"),
}  # fmt: skip
"""What each kernel fills, by the names of its arguments."""


def _results(kernel: Kernel, layer: Layer) -> dict[str, Tensor]:
    values = {name: layer.tensors[name] for name in _WRITES[kernel]}
    return {name: value.clone() for name, value in values.items() if value is not None}


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def _median_ms(run: Callable[[], None]) -> float:
    """Of some runs; compiled before."""
    times = []
    for _ in range(_ROUNDS):
        if not torch.cuda.is_available():
            began_s = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - began_s)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capability", type=int, nargs="+", default=list(SHARED_KIB),
                        choices=list(SHARED_KIB))  # fmt: skip
    parser.add_argument("--longest", type=int, nargs="+", default=[512, 128])
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1])
    arguments = parser.parse_args()
    columns = ("kernel, longest window: tile", "dropout", "registers", "spilled", "shared KiB",
               "blocks", "wide + other products")  # fmt: skip
    for capability in arguments.capability:
        sys.stdout.write(f"\n## sm_{capability}, Triton {triton.__version__}\n\n")
        sys.stdout.write("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|\n")
        for dropout in arguments.dropout:
            for line in rows(capability, arguments.longest, dropout):
                sys.stdout.write(line + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
