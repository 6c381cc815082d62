"""Small models of all families of layers, with weights in each format, as if read from files."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from mtpkit.checkpoint.load import ModelTensors, fill_model
from mtpkit.checkpoint.matrices import Weights
from mtpkit.config import ModelConfig
from mtpkit.kernels.quantized import Inputs
from mtpkit.model import build_model
from mtpkit.model.formats import ONLINE, Format, Fp8, Int4, Nvfp4, Quantized
from tests.toy_config import toy_config

GROUP = 16

WEIGHT_ONLY: dict[str, Format] = {
    "block": Fp8(rows=GROUP, columns=GROUP, inputs=Inputs()),
    "row": Fp8(rows=1, columns=None, scale="weight_scale", inputs=Inputs()),
    "matrix": Fp8(rows=None, columns=None, scale="weight_scale", inputs=Inputs()),
    "int4": Int4(columns=GROUP),
    "nvfp4": Nvfp4(),
    "reciprocal": Nvfp4(packed="weight_packed", whole="weight_global_scale"),
}
WITH_INPUTS: dict[str, Format] = {
    "block": Fp8(rows=GROUP, columns=GROUP, inputs=Inputs("group", GROUP)),
    "token": ONLINE,
    "static": Fp8(rows=None, columns=None, scale="weight_scale", inputs=Inputs("static")),
}
FORMATS = WEIGHT_ONLY | {f"{name}, inputs": kind for name, kind in WITH_INPUTS.items()}

_EXPERTS = dict(
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=32,
    moe_router_topk_scaling_factor=2.5,
)
_LATENT = dict(
    q_lora_rank=16,
    kv_lora_rank=32,
    qk_head_dim=12,
    qk_pos_emb_head_dim=4,
    v_head_dim=16,
    qk_layernorm=True,
)
_DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8
)
_SIZES = dict(vocab_size=48, mtp_num_depths=2, max_position_embeddings=128, init_std=0.25)

CONFIGS: dict[str, ModelConfig] = {
    "mamba2": toy_config(
        **_SIZES,
        **_EXPERTS,
        pattern="M*E",
        mtp_pattern="*E",
        moe_shared_expert_intermediate_size=16,
        moe_latent_size=16,
    ),
    "gated delta net": toy_config(
        **_SIZES,
        **_EXPERTS,
        **_DELTA,
        pattern="G*E",
        mtp_pattern="*E",
        activation="swiglu",
        moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False,
        moe_shared_expert_intermediate_size=32,
        moe_shared_expert_gate=True,
    ),
    "latent attention": toy_config(
        **_SIZES,
        **_EXPERTS,
        **_LATENT,
        pattern="+-+E",
        mtp_pattern="+E",
        activation="swiglu",
        moe_shared_expert_intermediate_size=16,
        mtp_use_repeated_layer=False,
    ),
    "dense": toy_config(
        **_SIZES, pattern="*-*-", mtp_pattern="*-", activation="swiglu", add_qkv_bias=True
    ),
}
PLAIN = ("word_embeddings", "router", "gate_weight", "in_proj.weight.beta", "in_proj.weight.alpha")
"""Parts of the names of matrices that quantisers leave as they are."""


class Stored(Weights):
    """Weights of a model, as a file with some of them quantised would give them.

    Args:
        kinds: format of a matrix by its name; None: it is stored plain.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], kinds: Callable[[str], Format | None]
    ) -> None:
        self._plain = dict(tensors)
        self._kept: dict[str, Quantized] = {}
        for name, tensor in tensors.items():
            kind = kinds(name) if tensor.dim() == 2 else None
            if kind is not None:
                self._kept[name] = quantize(kind, tensor)
                self._plain[name] = self._kept[name].widen()
        plain = build_infos(self._plain)
        self.tensors = plain

    @property
    def matrices(self) -> Mapping[str, Quantized]:
        return self._kept

    def quantized(self, name: str) -> Quantized:
        return self._kept[name]

    def read(self, name: str) -> Tensor:
        return self._plain[name]

    def require_finite(self) -> None:
        pass


def build_infos(tensors: Mapping[str, Tensor]) -> dict:
    from mtpkit.checkpoint.tensors import TensorInfo

    return {name: TensorInfo(tuple(each.shape), each.dtype) for name, each in tensors.items()}


def quantize(kind: Format, weight: Tensor) -> Quantized:
    """Quantise a matrix; a static scale of inputs depends on the matrix, so that parts differ."""
    if kind.inputs.rule != "static":
        return Quantized(kind, tuple(weight.shape), kind.quantize(weight))
    without = Fp8(rows=None, columns=None, scale="weight_scale", inputs=Inputs())
    scale = 0.02 * (1 + weight.abs().amax()).reshape(1, 1)
    return Quantized(kind, tuple(weight.shape), without.quantize(weight) | {"input_scale": scale})


def everywhere(kind: Format) -> Callable[[str], Format | None]:
    """One format for all matrices that quantisers quantise."""
    return lambda name: None if any(part in name for part in PLAIN) else kind


def stored(config: ModelConfig, kinds: Callable[[str], Format | None]) -> Stored:
    """A file of a random model."""
    tensors = ModelTensors(build_model(config, device="cpu", seed=4))
    return Stored({name: tensors.read(name) for name in tensors.tensors}, kinds)


def filled(config: ModelConfig, source: Stored, keep: bool = True, **parallel: int):
    """A model with the weights of a file, quantised as they are, or widened."""
    settings = dict(device="cpu", init="none", waiting=keep, sequence_parallel=False) | parallel
    model = build_model(config, **settings)
    fill_model(model, source, Path("file"))
    return model.requires_grad_(False)
