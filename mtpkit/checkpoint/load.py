"""Load weights from a model directory of either layout into a model, or build a model from a
directory alone."""

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor
from tqdm import tqdm

from mtpkit.checkpoint.directory import ModelDirectory, open_directory
from mtpkit.checkpoint.kv_scales import set_kv_scales
from mtpkit.checkpoint.layouts.megatron import base_layer, parameters, split_slice
from mtpkit.checkpoint.matrices import Weights, WidenedHeads
from mtpkit.checkpoint.shards import global_shape, local_slice, memory_of, targets_of
from mtpkit.checkpoint.tensors import (
    TensorInfo,
    TensorSource,
    bits_equal,
    require_same_names,
)
from mtpkit.checkpoint.waiting import (
    Quantization,
    WaitingWeights,
    quantized_linears,
    stays_quantized,
)
from mtpkit.errors import MtpkitError, UserError, listed
from mtpkit.kernels.kv_store import KVScales
from mtpkit.model import build_model
from mtpkit.model.formats import Quantized
from mtpkit.model.stages import StageBalance
from mtpkit.platform import default_device

_logger = logging.getLogger(__name__)

_HEAD_LAYER = re.compile(r"mtp\.layers\.\d+\.mtp_model_layer\.layers\.(\d+)\.(.+)")


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
    quantization: Quantization | None = None,
) -> HybridModel:
    """Build the model that a directory of either layout describes and load its weights, one tensor
    at a time. Matrices that are stored quantised stay so, as far as linears can multiply with them.

    If the model is split over processes, each process loads its part.

    Args:
        quantization: quantise matrices that are not stored quantised, see
            `mtpkit.model.quantized.quantize_base`.
        expert_tensor_parallel, balance: see `build_model`.
        sequence_parallel: None: on if there are several tensor-parallel ranks. Decoding needs
            False.

    Raises:
        UserError: there is no checkpoint, its config cannot be built, or its weights do not fit the
            config; or a quantised matrix cannot be split over the processes.
    """
    opened = open_directory(directory)
    stored = StoredModel(opened, dtype, device, quantization)
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
        waiting=stored.waiting,
    )
    stored.fill(model)
    return model


def load_sizes(
    directory: Path | str | ModelDirectory,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
) -> HybridModel:
    """The model that `load_model` would load on one device, without its values: all tensors are on
    device meta, those of quantised matrices with the shapes and dtypes of the files. Reads only
    what tells names, shapes and dtypes.

    Raises:
        UserError: as `load_model`, unless only values tell.
    """
    opened = open_directory(directory)
    sizes = _Sizes(opened.weights(fit_config=True, widen=dtype, expand_scales=True))
    model = build_model(
        opened.config,
        dtype,
        device="meta",
        init="none",
        waiting=stays_quantized(sizes, quantization, opened.path),
    )
    fill_model(model, sizes, opened.path, quantization=quantization)
    return model


class _Sizes(Weights):
    """Weights whose tensors are on device meta."""

    def __init__(self, source: Weights) -> None:
        self._source = source
        self.tensors = source.tensors

    @property
    def matrices(self) -> Mapping[str, Quantized]:
        return self._source.matrices

    def quantized(self, name: str) -> Quantized:
        return self.matrices[name]

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        return torch.empty(info.shape, dtype=info.dtype, device="meta")

    def require_finite(self) -> None:
        """No value is known."""


class StoredModel:
    """The weights of a model directory, checked before a model of its config's sizes is built.
    Matrices that are stored quantised stay so, as far as linears can multiply with them.

    Args:
        dtype: dtype of the model; what does not stay quantised is widened to it.
        device: as in `load_model`.
        quantization: as in `load_model`.
        widen_heads: widen quantised heads, which are to be trained.

    Raises:
        UserError: as `load_model`.
    """

    def __init__(
        self,
        directory: ModelDirectory,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        quantization: Quantization | None = None,
        widen_heads: bool = False,
    ) -> None:
        self._path = directory.path
        self._quantization = quantization
        # Before the weights are read, too: wrong scales are refused at once.
        self._scales = _kv_scales(directory)
        self._weights: Weights = directory.weights(
            fit_config=True,
            device=default_device() if device is None else device,
            widen=dtype,
            expand_scales=True,
        )
        if widen_heads:
            self._weights = WidenedHeads(self._weights)
        self.waiting = stays_quantized(self._weights, quantization, self._path)
        """Whether the model is to be built with linears that wait, see `build_model`."""

    def fill(
        self, model: HybridModel, strict: bool = True, allow_missing_heads: bool = False
    ) -> None:
        """Copy the weights into a model, see `load_model_weights`."""
        fill_model(
            model, self._weights, self._path, strict, allow_missing_heads, self._quantization
        )
        set_kv_scales(model, self._scales)

    @torch.no_grad()
    def copy_layers(self, model: HybridModel, numbers: Sequence[int]) -> None:
        """Copy layers of the base from the files into the layers of each head of a model, where
        this rank has heads. Quantised matrices are widened; others are copied as they are, though
        the model's base may be quantised while it is loaded.

        Args:
            numbers: the base layer for each layer of a head, in order.
        """
        for name, shards in targets_of(model).items():
            match = _HEAD_LAYER.match(name)
            if match is not None:
                value = self._weights.read(base_layer(numbers[int(match[1])]) + match[2])
                for shard in shards:
                    shard.data.copy_(value[local_slice(shard)])


def load_model_weights(
    model: HybridModel,
    directory: Path | str | ModelDirectory,
    strict: bool = True,
    allow_missing_heads: bool = False,
) -> None:
    """Copy weights into a model's parameters, casting them to its dtypes. At any parallelism, each
    rank takes its part. Matrices that are stored quantised are widened.

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
    scales = _kv_scales(opened)
    weights = opened.weights(device=next(model.parameters()).device)
    fill_model(model, weights, opened.path, strict, allow_missing_heads)
    set_kv_scales(model, scales)


def _kv_scales(directory: ModelDirectory) -> dict[str, KVScales]:
    """The scales of keys and values in fp8 of each attention that has some. Raises as
    `ModelDirectory.kv_scales`."""
    scales = directory.kv_scales.by_attention
    kind = directory.recipe.kv_cache if scales and directory.recipe else ""
    if kind in ("", "FP8"):
        return scales
    _logger.warning(
        "%s: scales of keys and values are for %s, so that a cache in fp8 takes 1 in their place",
        directory.path,
        kind,
    )
    return {}


@torch.no_grad()
def fill_model(
    model: HybridModel,
    source: TensorSource,
    where: Path,
    strict: bool = True,
    allow_missing_heads: bool = False,
    quantization: Quantization | None = None,
) -> None:
    """Copy opened weights into a model, see `load_model_weights`. Linears that wait for weights,
    see `build_model`, get quantised ones as they are stored.

    Args:
        where: directory of the weights, for messages.
        quantization: see `load_model`.
    """
    waiting = WaitingWeights(model, source, where, quantization)
    targets = targets_of(model)
    expected = {name: global_shape(shards[0]) for name, shards in targets.items()}
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
            if not waiting.fill(name, targets[name]):
                value = source.read(name)
                for shard in targets[name]:
                    shard.data.copy_(value[local_slice(shard)])
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
    targets = targets_of(model)
    changed = set()
    for name in (name for name in found if name in targets):
        value = source.read(name)
        # Compared in the model's dtype, which rounds what is stored: a base that was only cast is
        # unchanged.
        shards = [(shard.data.cpu(), value[local_slice(shard)]) for shard in targets[name]]
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
        filled[memory_of(shard.data)] += shard.data.numel()
    unfilled = [n for n, p in model.named_parameters() if filled[memory_of(p)] < p.numel()]
    if unfilled:
        raise MtpkitError(f"no tensor of a checkpoint fills {listed(unfilled)}")


def _heads[T](tensors: dict[str, T]) -> dict[str, T]:
    return {name: value for name, value in tensors.items() if name.startswith("mtp.")}


class ModelTensors:
    """The weights of a model in memory under Megatron's names.

    Raises:
        UserError: the model is spread over processes, or its weights are quantised.
    """

    def __init__(self, model: HybridModel) -> None:
        if names := quantized_linears(model):
            raise UserError(
                f"the model's weights are quantised ({listed(names)}); convert the directory that"
                " it was loaded from"
            )
        self._shards = targets_of(model)
        self.tensors = {
            name: TensorInfo(global_shape(s[0]), s[0].dtype) for name, s in self._shards.items()
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
            whole[local_slice(shard)] = shard.data
        return whole
