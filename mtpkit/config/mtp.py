"""The heads of a model: multi-token prediction (MTP)."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mtpkit.config.checked import checked
from mtpkit.config.sections import HeadPattern, Part, up_to
from mtpkit.errors import shown

_UNKNOWN_DEPTHS_DEFAULT, _UNKNOWN_DEPTHS_MOST = 3, 7
"""K by default, and the largest K of `auto`, for a repeated head of which nobody says how deep it was trained."""

HiddenState = Literal["after_final_norm", "before_final_norm"]


@checked("model config", prefix="mtp_")
class MtpConfig(Part):
    """Which layers an MTP depth has, how many depths there are, and what each reads."""

    added_later = ("reads_of_base", "reads_of_depth", "zero_first_embedding")

    pattern: HeadPattern = ""
    """Layers of one MTP depth; empty when the model has no heads."""
    num_depths: Annotated[int, up_to(64)] = 0
    """K, the number of depths the heads are trained for. A repeated head may be unrolled further when serving."""
    depths_known: bool = True
    """False: nothing says for how many depths a repeated head was trained; `num_depths` is 1 then."""
    repeated: bool = Field(default=True, validation_alias="mtp_use_repeated_layer")
    """One physical layer shared by all depths (Nemotron 3), rather than one per depth (DeepSeek-V3)."""
    reads_of_base: HiddenState = "after_final_norm"
    """Which hidden state of the base depth 1 reads. Only `after_final_norm` can be built."""
    reads_of_depth: HiddenState = "after_final_norm"
    """Which hidden state of a depth the next one reads. Only `after_final_norm` can be built."""
    zero_first_embedding: bool = False
    """Whether depths read zeros in place of the embedding at position 0. Only False can be built."""

    def problems(self) -> Iterator[str]:
        """Yield one clause for every setting that cannot be built."""
        if bool(self.pattern) != bool(self.num_depths):
            yield f"mtp_pattern {shown(self.pattern)} and mtp_num_depths {self.num_depths} must be set together"
        if not self.depths_known and not (self.num_depths == 1 and self.repeated):
            yield "mtp_depths_known false is for one repeated head with mtp_num_depths 1"
        for name in ("reads_of_base", "reads_of_depth"):
            if getattr(self, name) != "after_final_norm":
                yield f"mtp_{name} {getattr(self, name)!r} cannot be built yet, only 'after_final_norm'"
        if self.zero_first_embedding:
            yield "mtp_zero_first_embedding true cannot be built yet, only false"

    @property
    def num_layers(self) -> int:
        """Number of physical MTP layers: 1 when repeated, one per depth otherwise, 0 without heads."""
        return min(1, self.num_depths) if self.repeated else self.num_depths

    @property
    def default_drafts(self) -> int:
        """K where nobody sets it: the depths the heads are trained for, or 3 where those are unknown."""
        return self.num_depths if self.depths_known else _UNKNOWN_DEPTHS_DEFAULT

    @property
    def most_adaptive_drafts(self) -> int:
        """The largest K that `auto` tries: the depths the heads are trained for, or 7 where those are unknown."""
        return self.num_depths if self.depths_known else _UNKNOWN_DEPTHS_MOST
