"""Machine code of Triton kernels for GPUs that are not there, and what it does."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipeline.kernels.common_triton import Launch

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
         torch.int32: "*i32", torch.int64: "*i64"}  # fmt: skip
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# ptxas prints for each function; these are SASS instructions.
COUNTED = {"local stores": r"\bSTL", "local loads": r"\bLDL", "narrow stores": r"\bSTG\.E\.U?16",
           "narrow loads": r"\bLDG\.E\.U?16", "wide stores": r"\bSTG\.E\.128",
           "wide loads": r"\b(LDG\.E\.128|LDGSTS\.E\.(BYPASS\.)?(\w+\.)*128)", "HGMMA": r"\bHGMMA",
           "HMMA": r"\bHMMA"}  # fmt: skip


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
        code, usage = (
            subprocess.run([TOOL, option, file.name], check=True, capture_output=True, text=True)
            for option in ("-sass", "-res-usage")
        )
    counts = {name: len(re.findall(pattern, code.stdout)) for name, pattern in COUNTED.items()}
    registers = re.search(r"REG:(\d+)", usage.stdout + usage.stderr)
    assert registers, usage
    return counts | {"registers": int(registers[1]), "shared": binary.metadata.shared}
