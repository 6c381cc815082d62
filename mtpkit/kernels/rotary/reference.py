"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""

import torch
from torch import Tensor


def rotate(
    x: Tensor, positions: Tensor, frequencies: Tensor, factor: float = 1.0, paired: bool = False
) -> Tensor:
    """Rotate the first 2 w channels of each head, channel i with channel w + i, and scale them by
    `factor`.

    The other channels stay as they are.

    Args:
        x: [s, b, heads, d] of any strides. With a single sequence, b may be another dimension of
            heads.
        positions: [b, s] or [1, s] int64.
        frequencies: [w] fp32, radians per position.
        paired: channels 2 i and 2 i + 1 of x form a pair instead of i and w + i; the result pairs i
            and w + i anyway.

    Returns:
        [s, b, heads, d] in the dtype of x, computed in fp32.
    """
    angles = (positions.t()[..., None].float() * frequencies)[:, :, None]  # [s, b, 1, w]
    cos = angles.cos()
    sin = angles.sin()
    if factor != 1:
        cos = cos * factor
        sin = sin * factor
    width = 2 * len(frequencies)
    turned = x[..., :width].float()
    first, second = turned.unflatten(-1, (-1, 2)).unbind(-1) if paired else turned.chunk(2, -1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return rotated if width == x.shape[-1] else torch.cat([rotated, x[..., width:]], -1)
