"""What makes a model in the processes that decode with it."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

import torch

from mtpkit.config import ModelConfig

if TYPE_CHECKING:
    from mtpkit.model.hybrid import HybridModel


class ModelFactory(ABC):
    """Makes a model where it decodes, on each rank its part. It can be pickled, so that an engine
    in a process of its own makes the model there.

    `repr` tells factories of different models apart: ranks are compared by it.
    """

    mtpkit_config: ModelConfig
    """The config of the model."""

    @abstractmethod
    def make(
        self,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Literal["fp8"] | None,
        **parallel: Any,
    ) -> "HybridModel":
        """Make the model, in eval mode.

        Args:
            quantization: see `EngineOptions`.
            parallel: which part is this rank's, as arguments of `build_model`.

        Raises:
            UserError: it cannot be made.
        """
