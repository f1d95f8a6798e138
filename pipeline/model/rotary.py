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
        Two (..., 1, H) tables, fp32 at least, each angle standing twice side by side.
    """
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float64)
    frequencies = base ** (-exponents / head_size)
    angles = (positions[..., None, None].double() * frequencies).repeat_interleave(2, dim=-1)
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x_NH: Tensor, cos_1H: Tensor, sin_1H: Tensor) -> Tensor:
    """Turns (..., N, H) queries or keys by the angles of their positions; keeps dtype."""
    x = x_NH.to(cos_1H.dtype)
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return (x * cos_1H + turned * sin_1H).to(x_NH.dtype)
