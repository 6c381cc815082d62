"""The base's hidden states of packed sequences on disk, as heads read them, to train heads without
running the base.

    DIR/cache.json                           the manifest: base, data, sizes
    DIR/train-00000-of-00012.safetensors     `hidden` [rows, s, h]; in fp8 also
                                             `scale` [rows, s] float32
    DIR/eval-00000-of-00001.safetensors      the same for the held-out sequences

A shard gets its name when it is complete. `cache_write` writes them.

Shape legend: b batch, s sequence, h hidden size.
"""

import mtpkit.platform  # noqa: F401  (it prepares megatron-core's import, so it comes first)

# isort: split
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtpkit.config import HiddenState
from mtpkit.config.checked import checked, from_json
from mtpkit.data.dataset import PackedBatch
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import is_there, require_file
from mtpkit.kernels.linear import FP8, quantize_rows
from mtpkit.model import SequenceInput, base_forward
from mtpkit.model.hybrid import HybridModel

FORMAT = 3
"""Version of the manifest."""
OLDEST_FORMAT = 2
"""Oldest version that is read. Its digest of the base's config covers other keys, so that it cannot
be compared."""
MANIFEST = "cache.json"
SHARD_BYTES = 2**30
"""Approximate size of a shard, which holds at least one sequence."""


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states as cached: `values` [b, s, h] in the cache's dtype, and for fp8 the `scale` [b,
    s] fp32 of each token."""

    values: Tensor
    scale: Tensor | None = None

    @classmethod
    def encode(cls, hidden: Tensor, dtype: torch.dtype) -> "HiddenStates":
        """Convert hidden [b, s, h] to a dtype; fp8 has one scale per token."""
        if dtype != FP8:
            return cls(hidden.to(dtype))
        values, scale = quantize_rows(hidden)
        return cls(values, scale.squeeze(-1))

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The hidden states [b, s, h] in `dtype`."""
        if self.scale is None:
            return self.values.to(dtype)
        return (self.values.float() * self.scale[..., None]).to(dtype)

    def finite(self) -> list[bool]:
        """For each of the b sequences, whether it has neither NaN nor infinity; the host waits for
        the device."""
        parts = [part for part in (self.values, self.scale) if part is not None]
        return torch.stack(
            [torch.stack([*map(_is_finite, row)]).all() for row in zip(*parts, strict=True)]
        ).tolist()

    def map(self, change: Callable[[Tensor], Tensor]) -> "HiddenStates":
        """Apply `change` to both tensors."""
        return HiddenStates(change(self.values), None if self.scale is None else change(self.scale))


def _is_finite(values: Tensor) -> Tensor:
    """Whether all values are finite, [] bool; reads the extremes, forty times as fast on a CPU as
    `isfinite`."""
    if values.dtype == FP8:  # it has no infinity, and its NaNs are the bytes 7f and ff
        return (values.view(torch.int8).max() < 0x7F) & (values.view(torch.uint8).max() < 0xFF)
    return torch.stack(values.aminmax()).isfinite().all()


@torch.no_grad()
def base_states(model: HybridModel, batch: PackedBatch) -> Tensor:
    """The base's hidden states, [s, b, h] (s / tp under sequence parallelism), cached in the batch
    or computed."""
    if batch.hidden is None:
        inputs = SequenceInput(batch.documents, batch.positions, batch.document_lens)
        return base_forward(model, batch.token_ids, inputs)
    on_device = batch.hidden().map(
        lambda tensor: tensor.to(batch.token_ids.device, non_blocking=True)
    )
    hidden = on_device.decode(model.config.params_dtype).transpose(0, 1).contiguous()
    return scatter_to_sequence_parallel_region(hidden) if model.config.sequence_parallel else hidden


Size = Annotated[int, Field(ge=1, lt=2**63)]


@checked("sequences of a cache")
class Split:
    """The sequences of one data set, `rows_per_shard` in each shard but the last."""

    name: Annotated[str, Field(pattern="^(train|eval)$", title="train or eval")]
    fingerprint: str
    """Digest of the sequences."""
    num_sequences: Size
    rows_per_shard: Size

    @classmethod
    def plan(
        cls, name: str, fingerprint: str, num_sequences: int, row_bytes: int, multiple: int
    ) -> "Split":
        """Split sequences into shards of about equal size, each but the last a multiple of
        `multiple` sequences."""
        most = max(1, SHARD_BYTES // (row_bytes * multiple)) * multiple
        shards = -(-num_sequences // most)
        rows = -(-num_sequences // (shards * multiple)) * multiple
        return cls(name, fingerprint, num_sequences, rows)

    @property
    def files(self) -> list[str]:
        """Names of the shards, in order."""
        count = -(-self.num_sequences // self.rows_per_shard)
        return [f"{self.name}-{number:05d}-of-{count:05d}.safetensors" for number in range(count)]

    def rows(self, shard: int) -> range:
        """The sequences in a shard."""
        first = shard * self.rows_per_shard
        return range(first, min(first + self.rows_per_shard, self.num_sequences))


@checked("manifest of a cache")
class Manifest:
    """The origin and sizes of a cache. Caches with equal manifests, except names and files, hold
    the same numbers."""

    format: int
    base: str
    """Digest of the base's weights."""
    base_config: str
    """Digest of the base's config."""
    base_name: str
    """Directory of the weights."""
    base_files: dict[str, list[int]]
    """Size and modification time (ns) of each file of the weights."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    dtype: str
    """Dtype in which the base ran."""
    cache_dtype: Annotated[
        str,
        Field(
            pattern="^(float32|bfloat16|float8_e4m3fn)$", title="float32, bfloat16 or float8_e4m3fn"
        ),
    ]
    hidden_size: Size
    sequence_length: Size
    splits: list[Split]
    hidden_state: HiddenState = "after_final_norm"
    """The state of the base that heads read."""

    def differences(self, other: "Manifest") -> list[str]:
        """A clause for each difference from another manifest, except for held-out data that one of
        them lacks."""
        labels = {
            "base": (
                f"base {self.base_name} ({self.base[:8]})",
                f"{other.base_name} ({other.base[:8]})",
            ),
            "base_config": (
                f"config of the base ({self.base_config[:8]})",
                f"({other.base_config[:8]})",
            ),
            "tokenizer": (f"tokenizer {self.tokenizer[:8]}", other.tokenizer[:8]),
            "sequence_length": (
                f"data.sequence_length {self.sequence_length}",
                str(other.sequence_length),
            ),
            "dtype": (f"dtype {self.dtype}", other.dtype),
            "cache_dtype": (f"cache_dtype {self.cache_dtype}", other.cache_dtype),
            "hidden_state": (
                f"hidden states {_words(self.hidden_state)}",
                _words(other.hidden_state),
            ),
            "hidden_size": (f"hidden size {self.hidden_size}", str(other.hidden_size)),
        }
        if self.format != other.format:
            del labels["base_config"]
        found = [
            f"{was}, not {now}"
            for key, (was, now) in labels.items()
            if getattr(self, key) != getattr(other, key)
        ]
        splits = {split.name: split for split in self.splits}
        for now in other.splits:
            was = splits.get(now.name)
            if was is not None and (was.fingerprint, was.num_sequences) != (
                now.fingerprint,
                now.num_sequences,
            ):
                found.append(
                    f"data.{now.name} of {was.num_sequences:,} sequences ({was.fingerprint[:8]}), "
                    f"not {now.num_sequences:,} ({now.fingerprint[:8]})"
                )
        return found

    def problems(self) -> Iterator[str]:
        """Yield one clause if a data set has several splits."""
        names = [split.name for split in self.splits]
        if len(set(names)) < len(names):
            yield f"splits are {listed(map(shown, names))}, must be train and eval"

    def to_json(self) -> str:
        """The text of the file that `read_manifest` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"


def _words(hidden_state: str) -> str:
    return hidden_state.replace("_", " ")


def row_bytes(sequence_length: int, hidden_size: int, dtype: str) -> int:
    """Bytes per sequence in a shard."""
    values = getattr(torch, dtype)
    return sequence_length * (hidden_size * values.itemsize + (4 if values == FP8 else 0))


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a cache; None if the directory is empty or missing.

    Raises:
        UserError: the directory holds something else, or the manifest is damaged or has another
            version.
    """
    path = directory / MANIFEST
    if not path.is_file():
        if directory.exists() and (
            not directory.is_dir() or any(file.name[0] != "." for file in directory.iterdir())
        ):
            raise UserError(
                f"cache {directory} holds other files, but no cache of hidden states; set cache to"
                " another directory"
            )
        return None
    remedy = f"remove {directory}, and it is written again"
    return from_json(Manifest, path, remedy, version=FORMAT, oldest=OLDEST_FORMAT)


class HiddenReader:
    """Reads hidden states of one data set from memory-mapped shards.

    Raises:
        UserError: a shard is missing, damaged, or has other sizes than the manifest says.
    """

    def __init__(self, directory: Path, manifest: Manifest, split: Split):
        self._rows_per_shard = split.rows_per_shard
        self._files = [directory / name for name in split.files]
        dtypes = {"hidden": getattr(torch, manifest.cache_dtype)}
        dtypes |= {"scale": torch.float32} if dtypes["hidden"] == FP8 else {}
        self._shards: dict[str, list[Tensor]] = {key: [] for key in dtypes}
        for number, name in enumerate(split.files):
            shape = [len(split.rows(number)), manifest.sequence_length, manifest.hidden_size]
            for key, dtype in dtypes.items():
                tensor = _map_tensor(directory / name, key)
                found = list(tensor.shape)
                wanted = shape if key == "hidden" else shape[:2]
                if (found, tensor.dtype) != (wanted, dtype):
                    raise UserError(
                        f"{directory / name} has shape {found} in {tensor.dtype}, not {wanted} in"
                        f" {dtype}; remove it, and it is written again"
                    )
                self._shards[key].append(tensor)
        self._pin = torch.cuda.is_available()

    def read(self, rows: np.ndarray) -> HiddenStates:
        """The states of sequences `rows` [b], in memory that is pinned if there is a GPU.

        Raises:
            UserError: the states are not finite.
        """
        places = [divmod(int(row), self._rows_per_shard) for row in rows]
        gathered = []
        for tensors in self._shards.values():
            first = tensors[0]
            whole = torch.empty(
                (len(places), *first.shape[1:]), dtype=first.dtype, pin_memory=self._pin
            )
            for target, (shard, place) in zip(whole, places, strict=True):
                target.copy_(tensors[shard][place])
            gathered.append(whole)
        states = HiddenStates(*gathered)
        if bad := [
            self._files[shard]
            for good, (shard, _) in zip(states.finite(), places, strict=True)
            if not good
        ]:
            raise UserError(
                f"{bad[0]} holds hidden states of NaN or infinity; remove it, and it is written"
                " again"
            )
        return states


def _map_tensor(path: Path, name: str) -> Tensor:
    """Memory-map a tensor of a file."""
    if is_there(path):
        require_file(path)
    try:
        return safe_open(path, framework="pt").get_tensor(name)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; write it with mtpkit data cache") from error
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is damaged ({error}); remove it, and it is written again"
        ) from error
