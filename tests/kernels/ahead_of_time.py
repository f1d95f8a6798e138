"""`python -m tests.kernels.ahead_of_time`: compiles what would be launched, for GPUs not there.

Prints JSON: for each GPU, kind of batch and kernel, what the machine code does.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipeline.kernels import launches
from pipeline.kernels.windows import padded_width

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# ptxas prints for each function; these are SASS instructions.
COUNTED = {
    "local stores": r"\bSTL", "local loads": r"\bLDL", "narrow stores": r"\bSTG\.E\.U?16",
    "narrow loads": r"\bLDG\.E\.U?16", "wide stores": r"\bSTG\.E\.128",
    "wide loads": r"\b(LDG\.E\.128|LDGSTS\.E\.(BYPASS\.)?(\w+\.)*128)",
    "HGMMA": r"\bHGMMA", "HMMA": r"\bHMMA",
}  # fmt: skip


def launched(
    longest: int, head_size: int, capability: tuple[int, int], dropout: float, dtype: torch.dtype
) -> Iterator[launches.Launch]:
    """Of a forward and a backward pass over tensors that have no memory."""
    heads, tokens, width = 12, 8 * longest, padded_width(longest)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    wide = dtype == torch.float32
    qkv = empty(tokens, 3, heads, head_size)
    q, k, v = qkv.unbind(1)
    scores = empty(heads, tokens, width, dtype=torch.float32 if wide else torch.float16)
    gradient = empty(heads, tokens, width, dtype=torch.float32 if wide else torch.bfloat16)
    lse = empty(heads, tokens, dtype=torch.float32)
    spans, bounds = empty(tokens, 4, dtype=torch.int32), empty(9, dtype=torch.int32)
    seed = empty(1, dtype=torch.int64) if dropout else None
    numbers = launches.Numbers(longest, head_size**-0.5, 0.5, dropout)
    rows = empty(tokens, heads, head_size)
    tensors = {
        "q": q, "k": k, "v": v, "carry": scores, "scores": scores,
        "out": rows, "lse": lse, "spans": spans, "bounds": bounds, "seed": seed, "d_out": rows,
        "d_scores": gradient, "dq": rows, "dk": rows, "dv": rows,
        "d_carry": gradient,
    }  # fmt: skip
    yield launches.forward(tensors, numbers)
    yield from launches.backward(tensors, numbers, capability)


def compiled(launch: launches.Launch, capability: int) -> Any:
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
            tensor = isinstance(value, torch.Tensor)
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
        code = subprocess.run(
            [TOOL, "-sass", file.name], check=True, capture_output=True, text=True
        ).stdout
        usage = subprocess.run(
            [TOOL, "-res-usage", file.name], check=True, capture_output=True, text=True
        )
    counts = {name: len(re.findall(pattern, code)) for name, pattern in COUNTED.items()}
    registers = re.search(r"REG:(\d+)", usage.stdout + usage.stderr)
    assert registers, usage
    return counts | {"registers": int(registers[1]), "shared": binary.metadata.shared}


def main(cases: list[str]) -> dict[str, dict[str, int]]:
    """By GPU, case and kernel; a case is CAPABILITY-LONGEST-HEAD_SIZE-DROPOUT-DTYPE."""
    results = {}
    for case in cases:
        capability, longest, head_size, dropout, dtype = case.split("-")
        for launch in launched(
            int(longest), int(head_size), divmod(int(capability), 10), float(dropout),
            getattr(torch, dtype),
        ):  # fmt: skip
            name = f"{case} {launch.kernel.fn.__name__}"
            results[name] = found_in(compiled(launch, int(capability)))
    return results


if __name__ == "__main__":
    json.dump(main(sys.argv[1:]), sys.stdout)
