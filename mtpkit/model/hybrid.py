"""megatron-core's hybrid model, with what the rest of mtpkit asks of a model."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.core.models.hybrid.hybrid_model import HybridModel as MegatronHybridModel

from mtpkit.config import ModelConfig


class HybridModel(MegatronHybridModel):
    """The base and its MTP heads; made by `build_model` alone."""

    base_context: Callable[[], AbstractContextManager[None]]
    """What the base runs in, see `use_fp8_base`."""

    def __init__(self, model_config: ModelConfig, backend: str, stage_patterns: list[str], **megatron: Any) -> None:
        """Build megatron-core's model from its own arguments.

        Args:
            model_config: the model's description, kept as `mtpkit_config`.
            backend: name of the modules that it is made of.
            stage_patterns: the base's layers on each pipeline stage.
        """
        super().__init__(**megatron)
        self.mtpkit_config, self.backend, self.stage_patterns = model_config, backend, stage_patterns
        self.base_context = nullcontext
