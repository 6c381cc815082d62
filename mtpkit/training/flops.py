"""How much of a GPU's matrix rate a training step uses."""

import math
import re

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.models.hybrid.hybrid_model import HybridModel

PEAK_RATES = {
    "B200": 2250e12,
    "H200": 790e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "A40": 150e12,
    "L4": 121e12,
}
"""Dense bf16 FLOPs a second by what is in a device's name, the first match counting: NVIDIA's data sheets, and for the
H200 what an 8192^3 product of random matrices reaches there."""


def peak_rate(device_name: str) -> float | None:
    """Dense bf16 FLOPs a second of a device; None if it is not known.

    Example: `NVIDIA H100 80GB HBM3` and `NVIDIA GH200 480GB` are 989e12, `NVIDIA H100 PCIe` is 756e12.
    """
    found = (rate for name, rate in PEAK_RATES.items() if re.search(rf"\b{name}\b", device_name))
    return next(found, None)


def step_flops(model: HybridModel, num_depths: int) -> float:
    """Model FLOPs of a training step for each of its tokens.

    2 a weight of the base, which runs forward only; 6 a head weight and depth, for forward and backward; 4 a weight of
    the frozen lm_head and depth, for logits and the gradient to hidden states. Of a mixture of experts those weights
    count that a token uses. Embeddings, attention scores, recurrent states and the base's own logits are left out.

    Collective over the stages of a pipeline. A model without the base's layers, whose hidden states are cached, has
    none to count.
    """
    config = model.mtpkit_config
    base, heads = _count_weights(model)
    applied = num_depths if config.mtp_use_repeated_layer else 1
    return 2.0 * base + 6.0 * heads * applied + 4.0 * config.vocab_size * config.hidden_size * num_depths


def _count_weights(model: HybridModel) -> tuple[float, float]:
    """Weights that a token uses in the base's layers, and in the heads' as they are on disk, over all ranks."""
    config = model.mtpkit_config
    shards = nested_values(load_preprocess(model.sharded_state_dict())[0])
    sizes = {shard.key: math.prod(shard.global_shape) for shard in shards if isinstance(shard, ShardedTensor)}
    group = model.pg_collection.pp
    stages: list[dict[str, int]] = [{} for _ in range(group.size())]
    dist.all_gather_object(stages, sizes, group=group)
    used = config.moe_router_topk / config.num_moe_experts if config.num_moe_experts else 1.0
    counts = {"decoder": 0.0, "mtp": 0.0}
    for key, size in {key: size for stage in stages for key, size in stage.items()}.items():
        part = key.partition(".")[0]
        if part in counts:
            counts[part] += size * (used if ".experts." in key else 1)
    return counts["decoder"], counts["mtp"]


def model_flops_utilization(tokens_per_s: float, flops: float, num_devices: int, device: torch.device) -> float | None:
    """Share of the devices' dense bf16 rate that model FLOPs take (MFU, Chowdhery et al. 2022, arXiv:2204.02311).

    Args:
        tokens_per_s: of all devices together.
        flops: of a token, `step_flops`.

    Returns:
        None where the rate is not known, as on a CPU.
    """
    rate = peak_rate(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if rate is None else tokens_per_s * flops / (num_devices * rate)
