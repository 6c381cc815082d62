"""Sizes of gated delta nets."""

from typing import Annotated

from mtpkit.config.checked import checked
from mtpkit.config.sections.base import Count, Section, up_to


@checked("model config", prefix="linear_")
class GatedDeltaNetConfig(Section):
    """Gated delta net (Yang et al. 2024, arXiv:2412.06464)."""

    letter = "G"
    title = "gated delta net"
    positive = (
        "num_key_heads",
        "num_value_heads",
        "key_head_dim",
        "value_head_dim",
        "conv_kernel_dim",
    )
    multiples = (("num_value_heads", "num_key_heads"),)

    num_key_heads: Count = 0
    num_value_heads: Count = 0
    """A multiple of the number of key heads; the value heads of one key head share its queries and
    keys."""
    key_head_dim: Count = 128
    value_head_dim: Count = 128
    conv_kernel_dim: Annotated[int, up_to(2**10)] = 4

    @property
    def key_width(self) -> int:
        """Width of the keys of all heads together, and of the queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of the values of all heads together, and of the gates."""
        return self.num_value_heads * self.value_head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def projected(self) -> int:
        """Width of the input projection: queries, keys, values, gates, beta and alpha."""
        return self.convolved + self.value_width + 2 * self.num_value_heads
