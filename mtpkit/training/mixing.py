"""What the depths after the first read in training: the head's own states, or the base's in some places."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MixKind = Literal["sample", "blend"]


@dataclass(frozen=True)
class HiddenMix:
    """Puts the base's hidden states among those that a depth hands to the next; a `mix` of `unroll_depths`.

    Decoding, depth k + 1 at i reads g^k_i, which stands in for the base's h_{i+k}. With a share of 0 training does the
    same, as HASS has it (Zhang et al. 2024, arXiv:2408.15766). With a share of 1 every depth reads the base's states,
    as EAGLE trains (Li et al. 2024, arXiv:2401.15077), and never its own errors. Between the two it is scheduled
    sampling (Bengio et al. 2015, arXiv:1506.03099). Where the base's state is read no gradient reaches earlier depths.
    """

    share: float
    kind: MixKind = "sample"
    """`sample`: each position reads h_{i+k} with probability `share`, else g^k_i. `blend`: every position reads
    share * h_{i+k} + (1 - share) * g^k_i."""
    generators: Sequence[torch.Generator] = ()
    """One for the draws of each of the b sequences, on the device of the states; empty: torch's own for all."""
    part: tuple[int, int] = (0, 1)
    """Which part of the sequence the states are, of how many equal ones: each reads its own part of the same draws."""

    def __call__(self, own: Tensor, base: Tensor) -> Tensor:
        """[s, b, h] of own and base [s, b, h]."""
        if self.kind == "blend":
            return own.lerp(base, self.share)
        number, parts = self.part
        length, rows = len(own) * parts, own.shape[1]
        if self.generators:
            assert len(self.generators) == rows, "one a sequence"
            draws = torch.stack([torch.rand(length, generator=g, device=own.device) for g in self.generators], 1)
        else:
            draws = torch.rand(length, rows, device=own.device)
        return torch.where(draws.chunk(parts)[number][..., None] < self.share, base, own)
