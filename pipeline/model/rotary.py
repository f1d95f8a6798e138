"""Rotary positions in the interleaved form: coordinates (0, 1), (2, 3), ... turn together.

Source: Su et al. 2021 (arXiv 2104.09864), equation 34; bojone/bert4keras `bert4keras/backend.py`,
apply_rotary_position_embeddings. Shapes: B batch, N heads, S sequence, H head size.
"""

import torch
from torch import Tensor


def rotary_tables(positions_BS: Tensor, head_size: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles position * base^(-2i / head_size).

    They are computed where they are used and are no buffers: a module cast to bf16 casts its
    buffers too, and 8 bits cannot hold an angle.

    Args:
        positions_BS: (B, S) int64.
        head_size: even.
        base: 10000 in the paper.

    Returns:
        Two (B, 1, S, H) fp32 tables, each angle standing twice side by side.
    """
    exponents = torch.arange(0, head_size, 2, device=positions_BS.device, dtype=torch.float64)
    frequencies = base ** (-exponents / head_size)
    angles = positions_BS[:, None, :, None].double() * frequencies
    angles = angles.repeat_interleave(2, dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x_BNSH: Tensor, cos_B1SH: Tensor, sin_B1SH: Tensor) -> Tensor:
    """Turns queries or keys by the angles of their positions; keeps dtype."""
    x = x_BNSH.to(torch.promote_types(x_BNSH.dtype, torch.float32))
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return (x * cos_B1SH + turned * sin_B1SH).to(x_BNSH.dtype)
