"""One MTP head as a module: its parts, under Megatron's names. `mtpkit.model.mtp` runs them."""

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import validate_segment_layers
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from mtpkit.model.transformer_config import TransformerConfig


class MtpHead(MegatronModule):
    """Norms of the two inputs, projection of both to one, layers, and final norm.

    It stands in for megatron-core's `MultiTokenPredictionLayer`, of which mtpkit would use the
    parts alone. That class also looks for linears of Transformer Engine among them, which some
    releases can only do where Transformer Engine is installed.

    Args:
        norm, column_linear: classes of a `Backend`.
        layer_number: depth of the head, from 1.
        mtp_layer_pattern: megatron-core's letters of the layers.
        hybrid_submodules: specs of the layers, by kind.
        megatron: what else megatron-core gives a head: a virtual pipeline stage, and a name by
            which weights are quantized in training. mtpkit has neither.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        norm: type,
        column_linear: type,
        layer_number: int,
        mtp_layer_pattern: str,
        hybrid_submodules: HybridStackSubmodules,
        pg_collection: ProcessGroupCollection,
        **megatron: object,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number  # by which megatron-core names its weights in a checkpoint

        size = config.hidden_size
        eps = config.layernorm_epsilon
        self.enorm = norm(config=config, hidden_size=size, eps=eps)
        self.hnorm = norm(config=config, hidden_size=size, eps=eps)
        self.eh_proj = column_linear(
            2 * size,
            size,
            config=config,
            init_method=config.init_method,
            # `mtp_forward` gathers, since decoding has collectives of its own.
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="mtp_eh_proj",
            tp_group=pg_collection.tp,
        )
        self.mtp_model_layer = HybridStack(
            config=config,
            submodules=hybrid_submodules,
            layer_type_list=validate_segment_layers(mtp_layer_pattern),
            pp_layer_offset=0,
            pre_process=True,
            # `mtp_forward` decides whether the final norm runs.
            post_layer_norm=False,
            post_process=True,
            pg_collection=pg_collection,
            is_mtp_layer=True,
        )
        self.final_layernorm = norm(config=config, hidden_size=size, eps=eps)
