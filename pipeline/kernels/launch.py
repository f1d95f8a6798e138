"""A launch of a Triton kernel as data, so that it can be compiled ahead of time for any GPU."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """One kernel with everything it gets."""

    kernel: Any
    num_programs: int
    arguments: dict[str, Any]
    """Tensors and numbers by name."""
    constants: dict[str, Any]
    """Compiled in."""
    warps: int
    stages: int

    def run(self) -> None:
        """Starts it on the current stream."""
        self.kernel[(self.num_programs,)](
            **self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages
        )
