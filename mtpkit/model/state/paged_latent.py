"""Paged latents and rotary keys, from which multi-head latent attention computes the keys and
values of all heads."""

from dataclasses import dataclass

from torch import Tensor

from mtpkit.model.state.base import PagedState, Part, StateSizes, StateSpec


@dataclass(frozen=True)
class PagedLatent(PagedState):
    """One row for each position: the normed latent, then the rotated key that all heads share."""

    latent_width: int

    @property
    def rows(self) -> Tensor:
        """[num_blocks, block_size, latent_width + rotary width]."""
        return self.tensors["rows"]

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Latents [num_blocks, block_size, 1, latent_width] and rotary keys [num_blocks,
        block_size, 1, rotary width], views of the rows."""
        rows = self.rows[:, :, None]
        return rows[..., : self.latent_width], rows[..., self.latent_width :]


@dataclass(frozen=True)
class PagedLatentSpec(StateSpec):
    """Sizes of the row that one layer keeps for a token. All tensor-parallel ranks keep the same
    rows."""

    unit = "block"
    latent_width: int
    rotary_width: int

    def parts(self, sizes: StateSizes) -> dict[str, Part]:
        """See `StateSpec.parts`."""
        return {
            "rows": Part((sizes.block_size, self.latent_width + self.rotary_width), sizes.kv_dtype)
        }

    def make(self, tensors: dict[str, Tensor], sizes: StateSizes) -> PagedLatent:
        """See `StateSpec.make`."""
        return PagedLatent(tensors, self.latent_width)
