"""Frequencies of rotary position embedding (Su et al. 2021, arXiv:2104.09864), with YaRN for longer
contexts."""

import math

import torch
from torch import Tensor


def frequencies(width: int, base: float, device: torch.device | None = None) -> Tensor:
    """[width / 2] fp32, radians per position: base ** (-2 i / width)."""
    return base ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)


def yarn_frequencies(
    width: int,
    base: float,
    factor: float,
    original_context: int,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """Compute frequencies for contexts `factor` times as long (YaRN: Peng et al. 2023,
    arXiv:2309.00071, section 3.2).

    Frequencies that turn more than `beta_fast` times in `original_context` positions stay. Those
    that turn less than `beta_slow` times are divided by `factor`. Between them, a linear ramp over
    the frequency index blends both.

    Returns:
        [width / 2] fp32.
    """

    def number(turns: float) -> float:
        """Return the fractional index of the frequency that turns `turns` times in the original
        context."""
        return width * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(number(beta_fast)), 0)
    high = min(math.ceil(number(beta_slow)), width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / (high - low or 1e-3)
    kept = 1 - ramp.clamp(0, 1)
    own = frequencies(width, base)
    return own / factor * (1 - kept) + own * kept


def yarn_scale(factor: float, mscale: float) -> float:
    """m(mscale) = 0.1 mscale ln(factor) + 1, by which YaRN scales attention in longer contexts; 1
    if factor <= 1."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0
