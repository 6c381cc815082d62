"""Load weights from a model directory of either layout into a model, or build a model from a
directory alone."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor
from tqdm import tqdm

from mtpkit.checkpoint.directory import ModelDirectory, open_directory
from mtpkit.checkpoint.layouts.megatron import is_stacked, parameters, split_slice
from mtpkit.checkpoint.tensors import (
    Shape,
    TensorInfo,
    TensorSource,
    bits_equal,
    require_same_names,
)
from mtpkit.errors import MtpkitError, UserError, listed
from mtpkit.model import build_model
from mtpkit.model.stages import StageBalance
from mtpkit.platform import default_device


def load_model(
    directory: Path | str | ModelDirectory,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = "cpu",
    backend: str = "local",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    expert_tensor_parallel: int | None = None,
    sequence_parallel: bool | None = None,
    balance: StageBalance = "memory",
) -> HybridModel:
    """Build the model that a directory of either layout describes and load its weights, one tensor
    at a time.

    If the model is split over processes, each process loads its part.

    Args:
        expert_tensor_parallel, balance: see `build_model`.
        sequence_parallel: None: on if there are several tensor-parallel ranks. Decoding needs
            False.

    Raises:
        UserError: there is no checkpoint, its config cannot be built, or its weights do not fit the
            config.
    """
    opened = open_directory(directory)
    # refuses wrong files before a model of their config's sizes is built
    weights = opened.weights(fit_config=True, device=default_device() if device is None else device)
    model = build_model(
        opened.config,
        dtype=dtype,
        device=device,
        backend=backend,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        expert_parallel=expert_parallel,
        sequence_parallel=tensor_parallel > 1 if sequence_parallel is None else sequence_parallel,
        expert_tensor_parallel=expert_tensor_parallel,
        balance=balance,
        init="none",
    )
    fill_model(model, weights, opened.path)
    return model


def load_model_weights(
    model: HybridModel,
    directory: Path | str | ModelDirectory,
    strict: bool = True,
    allow_missing_heads: bool = False,
) -> None:
    """Copy weights into a model's parameters, casting them to its dtypes. At any parallelism, each
    rank takes its part.

    Args:
        strict: tensors that the model does not have are an error.
        allow_missing_heads: leave the model's `mtp.*` as they are unless the checkpoint has exactly
            these heads.

    Raises:
        UserError: tensors are missing, unexpected, of another shape or no floats, which is checked
            before a parameter changes; or they are not finite, which is known after all are read.
            The message names them.
    """
    opened = open_directory(directory)
    weights = opened.weights(device=next(model.parameters()).device)
    fill_model(model, weights, opened.path, strict, allow_missing_heads)


@torch.no_grad()
def fill_model(
    model: HybridModel,
    source: TensorSource,
    where: Path,
    strict: bool = True,
    allow_missing_heads: bool = False,
) -> None:
    """Copy opened weights into a model, see `load_model_weights`.

    Args:
        where: directory of the weights, for messages.
    """
    targets = _targets(model)
    expected = {name: _global_shape(shards[0]) for name, shards in targets.items()}
    found = source.tensors
    if allow_missing_heads and {n: t.shape for n, t in _heads(found).items()} != _heads(expected):
        # Both sides are narrowed: heads of other sizes in the checkpoint are no error either.
        expected = {name: expected[name] for name in expected.keys() - _heads(expected).keys()}
        found = {name: found[name] for name in found.keys() - _heads(found).keys()}
    _require_all_targets(model, targets)
    # A stage or an expert-parallel rank has a part of the tensors, so others are no surprise to it.
    whole = model.pg_collection.pp.size() == 1 and model.config.expert_model_parallel_size == 1
    require_same_names(where, found, expected, extra_ok=not (strict and whole))
    # In the checkpoint's order, so that a tensor that splits into several is read once.
    sizes = {name: info.nbytes for name, info in source.tensors.items() if name in expected}
    with tqdm(
        total=sum(sizes.values()),
        unit="B",
        unit_scale=True,
        desc="reading weights",
        delay=1,
        disable=None,
    ) as bar:
        for name, nbytes in sizes.items():
            value = source.read(name)
            for shard in targets[name]:
                shard.data.copy_(value[_local_slice(shard)])
            bar.update(nbytes)
    source.require_finite()
    if next(model.parameters()).device.type == "cuda":
        torch.cuda.empty_cache()  # blocks cached while reading have sizes that nothing else reuses


@torch.no_grad()
def unchanged_base(model: HybridModel, directory: ModelDirectory) -> set[str]:
    """Keys on disk of the base's tensors that are still equal to what `load_model` reads from a
    directory. Collective.

    The set is empty if the directory's base has other tensors than the model's.
    """
    source = directory.weights()
    found = {
        name: info.shape for name, info in source.tensors.items() if not name.startswith("mtp.")
    }
    expected = {
        name: shape
        for name, shape in parameters(model.mtpkit_config).items()
        if not name.startswith("mtp.")
    }
    # Names alone do not do: a base with another vocabulary has the same names.
    if found != expected:
        return set()
    targets = _targets(model)
    changed = set()
    for name in (name for name in found if name in targets):
        value = source.read(name)
        # Compared in the model's dtype, which rounds what is stored: a base that was only cast is
        # unchanged.
        shards = [(shard.data.cpu(), value[_local_slice(shard)]) for shard in targets[name]]
        if not all(bits_equal(own, stored.to(own.dtype)) for own, stored in shards):
            changed.add(split_slice(name)[0])
    # A stacked tensor is unchanged only if all its rows are, and ranks hold different rows.
    gathered: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, changed)
    return {split_slice(name)[0] for name in found}.difference(*gathered)


def _require_all_targets(
    model: HybridModel, targets: Mapping[str, Sequence[ShardedTensor]]
) -> None:
    """Check that a checkpoint's tensors fill every parameter, since nothing else initialises their
    memory."""
    filled: Counter[int] = Counter()
    for shard in (shard for shards in targets.values() for shard in shards):
        # By memory and not by name: several tensors of a file may fill one parameter.
        filled[shard.data.untyped_storage().data_ptr()] += shard.data.numel()
    unfilled = [
        n for n, p in model.named_parameters() if filled[p.untyped_storage().data_ptr()] < p.numel()
    ]
    if unfilled:
        raise MtpkitError(f"no tensor of a checkpoint fills {listed(unfilled)}")


def _heads[T](tensors: dict[str, T]) -> dict[str, T]:
    return {name: value for name, value in tensors.items() if name.startswith("mtp.")}


class ModelTensors:
    """The weights of a model in memory under Megatron's names.

    Raises:
        UserError: the model is spread over processes.
    """

    def __init__(self, model: HybridModel) -> None:
        self._shards = _targets(model)
        self.tensors = {
            name: TensorInfo(_global_shape(s[0]), s[0].dtype) for name, s in self._shards.items()
        }
        for name, shards in self._shards.items():
            if sum(shard.data.numel() for shard in shards) < math.prod(self.tensors[name].shape):
                raise UserError(
                    "the model is spread over processes; save it with save_model and convert that"
                )

    def read(self, name: str) -> Tensor:
        shards, (shape, dtype) = self._shards[name], self.tensors[name]
        if len(shards) == 1:
            return shards[0].data.cpu()
        whole = torch.empty(shape, dtype=dtype)
        for shard in shards:  # such as both halves of a gated MLP's first matrix
            whole[_local_slice(shard)] = shard.data
        return whole


def _targets(model: HybridModel) -> dict[str, list[ShardedTensor]]:
    """Views of this rank's parameters and buffers, by Megatron's name on disk."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    targets = defaultdict(list)
    for shard in nested_values(load_preprocess(model.sharded_state_dict())[0]):
        if isinstance(shard, ShardedTensor):
            assert shard.data.untyped_storage().data_ptr() in own, f"{shard.key} is a copy"
            stacked = is_stacked(shard.key)
            targets[f"{shard.key}[{shard.global_offset[0]}]" if stacked else shard.key].append(
                shard
            )
    return targets


def _global_shape(shard: ShardedTensor) -> Shape:
    return tuple(shard.global_shape[shard.prepend_axis_num :])


def _local_slice(shard: ShardedTensor) -> tuple[slice, ...]:
    offsets = shard.global_offset[shard.prepend_axis_num :]
    return tuple(
        slice(start, start + size) for start, size in zip(offsets, shard.local_shape, strict=True)
    )
