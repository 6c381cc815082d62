"""Sizes and switches of feed-forward layers."""

from typing import Literal

from mtpkit.config.checked import checked
from mtpkit.config.sections.base import Section, Width


@checked("model config")
class MlpConfig(Section):
    """A feed-forward network."""

    letter = "-"
    title = "MLP"
    positive = ("ffn_hidden_size",)

    ffn_hidden_size: Width = 0
    activation: Literal["relu2", "swiglu"] = "relu2"
    """Activation of feed-forward layers and of experts."""

    @property
    def gated(self) -> bool:
        """Whether the first matrix makes gates besides values."""
        return self.activation == "swiglu"
