"""Sizes and switches of Mamba2 layers."""

import math
from typing import Annotated

from pydantic import AfterValidator, Field

from mtpkit.config.checked import checked
from mtpkit.config.sections.base import Count, Number, Section, up_to
from mtpkit.files import JsonObject

_Limits = tuple[Number, int | Annotated[float, Field(allow_inf_nan=True)]]


def _check_range(limit: _Limits) -> _Limits:
    low, high = limit
    if not 0 <= low < high or low > 1e6 or 2**53 < high < math.inf:
        raise ValueError(
            "must be 0 <= low < high, with low at most 1e6 and high at most 2^53 or infinite"
        )
    return limit


@checked("model config", prefix="mamba_")
class Mamba2Config(Section):
    """Mamba2 (Dao and Gu 2024, arXiv:2405.21060)."""

    letter = "M"
    title = "Mamba2"
    positive = ("num_heads", "head_dim", "state_dim", "num_groups", "conv_kernel", "chunk_size")
    multiples = (("num_heads", "num_groups"),)

    num_heads: Count = 0
    head_dim: Count = 64
    state_dim: Count = 128
    num_groups: Count = 1
    conv_kernel: Annotated[int, up_to(2**10)] = 4
    chunk_size: Annotated[int, up_to(2**12)] = 128
    dt_limit: Annotated[_Limits, AfterValidator(_check_range)] = (0.0, math.inf)
    """Limits to which dt is clamped after its softplus."""

    @property
    def inner(self) -> int:
        """Width of the input values of the recurrence, all heads together."""
        return self.num_heads * self.head_dim

    @property
    def bc_width(self) -> int:
        """Width of B of all groups together, and of C."""
        return self.num_groups * self.state_dim

    @property
    def projected(self) -> int:
        """Width of the input projection: z, x, B, C and dt."""
        return 2 * self.inner + 2 * self.bc_width + self.num_heads

    @classmethod
    def from_file(cls, values: JsonObject) -> JsonObject:
        """Read an upper limit of null as infinity."""
        match values.get("mamba_dt_limit"):
            case [low, None]:
                return values | {"mamba_dt_limit": (low, math.inf)}
        return values
