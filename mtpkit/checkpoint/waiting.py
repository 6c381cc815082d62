"""Fill linears that wait for their weights with matrices that stay quantised."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor, nn

from mtpkit.checkpoint.layouts.megatron import is_stacked
from mtpkit.checkpoint.matrices import Weights
from mtpkit.checkpoint.shards import local_slice, memory_of, targets_of
from mtpkit.checkpoint.tensors import TensorSource
from mtpkit.errors import UserError, listed
from mtpkit.model.formats import CutGroup, Format, Quantized
from mtpkit.model.formats.weight import QuantizedWeight
from mtpkit.model.quantized import allocate, online, quantizable_base, replace_weight, waiting_in

Quantization = Literal["fp8"]
"""Ways to quantise matrices while they are loaded, with vLLM's names."""


def _formats(source: TensorSource) -> Mapping[str, Format]:
    """Formats of the matrices that a source can give as they are stored, by name."""
    return source.formats if isinstance(source, Weights) else {}


def stays_quantized(source: TensorSource, quantization: Quantization | None, where: Path) -> bool:
    """Whether a model of these weights will have quantised ones.

    Raises:
        UserError: the weights are stored in another format than the wanted one.
    """
    stored = {each.name for each in _formats(source).values()}
    if quantization is not None and stored - {quantization}:
        raise UserError(
            f"quantization is {quantization}, but {where} is stored in {listed(sorted(stored))}:"
            " leave it out"
        )
    return bool(stored) or quantization is not None


class _Piece(NamedTuple):
    """Neighbouring rows of a linear's weight, from row `start`."""

    start: int
    rows: Quantized | Tensor


class WaitingWeights:
    """The weights on device meta of a model's linears, see `build_model`. Those that are not
    quantised in the source get memory, and are filled like other parameters.

    Args:
        where: directory of the weights, for messages.
        quantization: quantise what is not stored quantised, see
            `mtpkit.model.quantized.quantize_base`.
    """

    def __init__(
        self,
        model: HybridModel,
        source: TensorSource,
        where: Path,
        quantization: Quantization | None,
    ) -> None:
        self._source = source
        self._ranks = model.config.tensor_model_parallel_size
        self._where = where
        self._formats: Mapping[str, Format] = {}
        self._online: set[int] = set()
        self._modules = {memory_of(module.weight): module for module in waiting_in(model)}
        self._pieces: dict[int, list[_Piece]] = defaultdict(list)
        if not self._modules:
            return
        self._formats = _formats(source)
        # A file that is quantised decides for all of its matrices.
        if quantization is not None and not self._formats:
            self._online = {memory_of(module.weight) for module in quantizable_base(model)}
        devices = (each.device for each in model.parameters() if not each.is_meta)
        found = next(devices, torch.device("meta"))  # a model of sizes alone has no other
        stored = {
            memory_of(shard.data)
            for name, shards in targets_of(model).items()
            for shard in shards
            if name in self._formats
        }
        for place, module in [*self._modules.items()]:
            if not module.quantizable or place not in stored | self._online:
                allocate(self._modules.pop(place), found)
        self._device = found

    def fill(self, name: str, shards: Sequence[ShardedTensor]) -> bool:
        """Read a tensor into the linears that wait for it; return False if none does.

        Raises:
            UserError: its groups cannot be split over the ranks.
        """
        waiting = [shard for shard in shards if memory_of(shard.data) in self._modules]
        if not waiting:
            return False
        assert len(waiting) == len(shards), f"{name} is only in part a linear's"
        whole = self._read(name, memory_of(shards[0].data))
        for shard in shards:
            place = memory_of(shard.data)
            weight = self._modules[place].weight
            start = shard.data.storage_offset() // weight.shape[1]
            self._pieces[place].append(_Piece(start, self._own(name, whole, shard)))
            if sum(piece.rows.shape[0] for piece in self._pieces[place]) == len(weight):
                self._complete(place, weight.dtype)
        return True

    def _read(self, name: str, place: int) -> Quantized | Tensor:
        if name in self._formats:
            assert isinstance(self._source, Weights)
            return self._source.quantized(name)
        value = self._source.read(name)
        return online(value) if place in self._online else value

    def _own(
        self, name: str, whole: Quantized | Tensor, shard: ShardedTensor
    ) -> Quantized | Tensor:
        """This rank's part of a matrix, on the device of the model."""
        rows, columns = local_slice(shard)
        if isinstance(whole, Tensor):
            return whole[rows, columns].to(self._device)
        outputs, width = whole.shape
        try:
            if rows != slice(0, outputs):
                whole = _taken(whole, torch.arange(rows.start, rows.stop))
            if columns != slice(0, width):
                whole = whole.take_columns(columns.start, columns.stop)
        except CutGroup as error:
            advice = "use fewer"
            if is_stacked(name):
                advice += ", or give them whole experts (enable_expert_parallel)"
            raise UserError(
                f"{self._where}: {name} cannot be split over {self._ranks} tensor-parallel ranks,"
                f" {error}: {advice}"
            ) from error
        return whole.to(self._device)

    def _complete(self, place: int, dtype: torch.dtype) -> None:
        pieces = sorted(self._pieces.pop(place), key=lambda piece: piece.start)
        weight = QuantizedWeight([piece.rows for piece in pieces], dtype)
        replace_weight(self._modules[place], weight)


def _taken(matrix: Quantized, rows: Tensor) -> Quantized:
    """Rows of a matrix; where they cut blocks, each row gets the scales of its block."""
    try:
        return matrix.take_rows(rows)
    except CutGroup:
        return matrix.expanded().take_rows(rows)


def quantized_linears(model: nn.Module) -> list[str]:
    """Names of a model's linears whose weights are quantised."""
    return [name for name, module in model.named_modules() if isinstance(module, QuantizedWeight)]
