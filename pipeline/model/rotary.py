"""Rotary positions in the interleaved form: coordinates (0, 1), (2, 3), ... turn together.

Source: Su et al. 2021 (arXiv 2104.09864), equation 34; bojone/bert4keras `bert4keras/backend.py`,
apply_rotary_position_embeddings. Shapes: ... any (tokens), N heads, H head size.
"""

import torch
from torch import Tensor


def rotary_tables(
    positions: Tensor, head_size: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles position * base^(-2i / head_size).

    They are computed where they are used and are no buffers: a module cast to bf16 casts its
    buffers too, and 8 bits cannot hold an angle.

    Args:
        positions: (...) int64.
        head_size: even.
        base: 10000 in the paper.
        dtype: of the activations.

    Returns:
        Two (..., 1, H / 2) tables, fp32 at least: one angle for each pair of coordinates.
    """
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float64)
    frequencies = base ** (-exponents / head_size)
    angles = positions[..., None, None].double() * frequencies
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x_NH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns (..., N, H) queries or keys by the angles of `rotary_tables`; keeps dtype."""
    x = x_NH.to(cos.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x_NH.dtype)
