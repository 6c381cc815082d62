"""A rank's parts of the tensors of a model, by their names in checkpoints."""

from collections import defaultdict

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from mtpkit.checkpoint.layouts.megatron import is_stacked
from mtpkit.checkpoint.tensors import Shape


def targets_of(model: HybridModel) -> dict[str, list[ShardedTensor]]:
    """Views of this rank's parameters and buffers, by Megatron's name on disk. Quantised weights
    have none."""
    own = {memory_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    targets = defaultdict(list)
    for shard in nested_values(load_preprocess(model.sharded_state_dict())[0]):
        if isinstance(shard, ShardedTensor):
            assert memory_of(shard.data) in own, f"{shard.key} is a copy"
            stacked = is_stacked(shard.key)
            targets[f"{shard.key}[{shard.global_offset[0]}]" if stacked else shard.key].append(
                shard
            )
    return targets


def memory_of(tensor: Tensor) -> int:
    """What a tensor and its views have in common, also on device meta."""
    return tensor.untyped_storage()._cdata


def global_shape(shard: ShardedTensor) -> Shape:
    """Shape of the whole tensor."""
    return tuple(shard.global_shape[shard.prepend_axis_num :])


def local_slice(shard: ShardedTensor) -> tuple[slice, ...]:
    """Where the part lies in the whole tensor."""
    offsets = shard.global_offset[shard.prepend_axis_num :]
    return tuple(
        slice(start, start + size) for start, size in zip(offsets, shard.local_shape, strict=True)
    )
