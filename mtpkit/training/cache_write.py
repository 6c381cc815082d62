"""Write a cache of hidden states on all data-parallel ranks; announces its size first, and can be
resumed."""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from mtpkit.checkpoint import open_directory
from mtpkit.checkpoint.verify import fingerprint_base, fingerprint_config
from mtpkit.config import ModelConfig
from mtpkit.data.dataset import PackedDataset
from mtpkit.data.tokenizer import fingerprint, load_tokenizer
from mtpkit.errors import MtpkitError, UserError, listed
from mtpkit.files import staged_file, storage_errors, write_file
from mtpkit.model import gather_sequence
from mtpkit.model.hybrid import HybridModel
from mtpkit.platform import default_device, ensure_distributed, matmul_precision, on_first_rank
from mtpkit.training.batches import open_dataset
from mtpkit.training.cache import (
    FORMAT,
    MANIFEST,
    HiddenReader,
    HiddenStates,
    Manifest,
    Split,
    base_states,
    read_manifest,
    row_bytes,
)
from mtpkit.training.config.settings import TrainConfig
from mtpkit.training.heads import build_with_heads, drop_base_layers, freeze_base, resolve
from mtpkit.training.parallel import check_layout

LOCK = ".lock"
"""File that a process locks while it writes a cache."""
Missing = dict[str, list[int]]
"""Numbers of the missing shards, by split."""


def write_cache(config: TrainConfig) -> None:
    """Write the cache that a run with these settings would write before its first step. Collective
    over all ranks.

    Raises:
        UserError, StorageError: as `attach_cache`; or the settings have no `cache`.
    """
    if not config.cache:
        raise UserError("no cache to write: set cache=DIR")
    parallel = config.parallel
    ensure_distributed(parallel.tensor, parallel.pipeline, parallel.expert)
    config, model_config = resolve(config)
    check_layout(parallel, model_config)
    train = open_dataset(config, config.data.train)
    heldout = open_dataset(config, config.data.eval) if config.data.eval else None
    with matmul_precision(config.matmul_precision):
        attach_cache(config, model_config, train, heldout)


def attach_cache(
    config: TrainConfig,
    model_config: ModelConfig,
    train: PackedDataset,
    heldout: PackedDataset | None,
) -> tuple[PackedDataset, PackedDataset | None]:
    """Attach the base's hidden states in `config.cache` to both data sets; missing shards are
    written first.

    Collective over all ranks, which need the same file system.

    Args:
        model_config: config of the trained model; about its heads, only `reads_of_base` matters.

    Raises:
        UserError: the cache belongs to another base or other data, is damaged, or is being written;
            or the disk has too little space.
        StorageError: writing failed; finished shards stay.
    """
    directory = Path(config.cache)
    datasets = {"train": train} | ({"eval": heldout} if heldout is not None else {})
    manifest, missing = on_first_rank(lambda: _plan(config, model_config, datasets))
    if any(missing.values()):
        with _writing(directory, manifest):
            headless = replace(config, heads=replace(config.heads, init="fresh"))
            model = build_with_heads(
                headless, model_config.replace(mtp_pattern="", mtp_num_depths=0), default_device()
            )
            freeze_base(model)
            _write(directory, manifest, missing, model, datasets, config)
            drop_base_layers(model)
            dist.barrier()
    for split in manifest.splits:
        if split.name in datasets:
            datasets[split.name] = datasets[split.name].with_hidden(
                HiddenReader(directory, manifest, split).read
            )
    return datasets["train"], datasets.get("eval")


def _plan(
    config: TrainConfig, model_config: ModelConfig, datasets: Mapping[str, PackedDataset]
) -> tuple[Manifest, Missing]:
    """Make the manifest of the cache, and find its missing shards; these are announced."""
    directory = Path(config.cache)
    before = read_manifest(directory)
    known = (Path(before.base_name), before.base, before.base_files) if before else None
    digest, files = fingerprint_base(Path(config.model), known)
    dtype = config.dtype if config.cache_dtype == "auto" else config.cache_dtype
    size = row_bytes(config.data.sequence_length, model_config.hidden_size, dtype)
    multiple = config.data.micro_batch_size
    now = Manifest(
        format=FORMAT,
        base=digest,
        base_config=fingerprint_config(model_config),
        base_name=str(Path(config.model).resolve()),
        base_files=files,
        tokenizer=fingerprint(load_tokenizer(config.model)),
        dtype=_numbers(config),
        cache_dtype=dtype,
        hidden_size=model_config.hidden_size,
        sequence_length=config.data.sequence_length,
        hidden_state=model_config.mtp.reads_of_base,
        splits=[
            Split.plan(name, data.fingerprint, len(data), size, multiple)
            for name, data in datasets.items()
        ],
    )
    if before is not None:
        if differences := before.differences(now):
            raise UserError(
                f"cache {directory} was written for other inputs:"
                f" {listed(differences, separator='; ')}; set cache to another directory"
            )
        # An existing cache keeps its shard sizes, which may come from other settings.
        splits = {split.name: split for split in (*now.splits, *before.splits)}
        now = replace(now, splits=list(splits.values()))
    missing = {
        split.name: [
            number for number, file in enumerate(split.files) if not (directory / file).exists()
        ]
        for split in now.splits
        if split.name in datasets
    }
    if any(missing.values()):
        _announce(directory, now, missing, size)
    return now, missing


def _numbers(config: TrainConfig) -> str:
    """The dtype in which the base runs, and what else changes its hidden states."""
    if config.base_fp8:
        return f"{config.dtype} with base_fp8"
    widens = config.backend == "te" and open_directory(Path(config.model)).is_quantized
    return config.dtype + (" with backend=te" if widens else "")


def _announce(directory: Path, manifest: Manifest, missing: Missing, size: int) -> None:
    """Print how much will be written; refuse it if there is too little space."""
    splits = [split for split in manifest.splits if split.name in missing]
    existing = next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.exists()
    )
    free = shutil.disk_usage(existing).free
    needed = sum(len(split.rows(shard)) * size for split in splits for shard in missing[split.name])
    shards = sum(len(split.files) for split in splits)
    absent = sum(map(len, missing.values()))
    sequences = " and ".join(f"{split.num_sequences:,} {split.name}" for split in splits)
    tqdm.write(
        f"cache {directory}: hidden states of {sequences} sequences of {manifest.sequence_length:,}"
        f" tokens, {manifest.hidden_size:,} {manifest.cache_dtype} values per token:"
        f" {_gigabytes(needed)} to write in {absent:,} of {shards:,} shards; {_gigabytes(free)} are"
        " free"
    )
    if needed > free:
        raise UserError(
            f"cache {directory} needs {_gigabytes(needed)}, but {_gigabytes(free)} are free in"
            f" {existing}; set cache to a larger disk, cache_dtype=float8_e4m3fn, or use less data"
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e9:.2g} GB"


@contextmanager
def _writing(directory: Path, manifest: Manifest) -> Iterator[None]:
    """Write the manifest, and lock the directory against other writers. Collective."""
    locks: list[int] = []

    def begin() -> None:
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            # NFS cannot lock directories
            locks.append(os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666))
            try:
                fcntl.flock(locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"cache {directory} is being written by another process; wait for it"
                ) from error
            for torn in directory.glob(".*.writing*"):
                torn.unlink()
        write_file(directory / MANIFEST, manifest.to_json())

    try:
        on_first_rank(begin)
        yield
    finally:
        for lock in locks:
            os.close(lock)


@torch.no_grad()
def _write(
    directory: Path,
    manifest: Manifest,
    missing: Missing,
    model: HybridModel,
    datasets: Mapping[str, PackedDataset],
    config: TrainConfig,
) -> None:
    groups = model.pg_collection
    rank = groups.dp.rank()
    ranks = groups.dp.size()
    together = groups.ep.size() > 1
    splits = [split for split in manifest.splits if missing.get(split.name)]
    total = sum(
        len(split.rows(shard)) for split in splits for shard in missing[split.name][rank::ranks]
    )
    bar = tqdm(
        total=total * manifest.sequence_length,
        desc=f"caching hidden states (rank 0 of {ranks})" if ranks > 1 else "caching hidden states",
        unit=" tokens",
        unit_scale=True,
        disable=None if dist.get_rank() == 0 else True,
    )
    dtype = getattr(torch, manifest.cache_dtype)
    # A shard is saved while the next one is computed.
    with bar, ThreadPoolExecutor(1) as saver:
        saving: Future | None = None
        for split in splits:
            for shard, rows in _share(split, missing[split.name], rank, ranks, together):
                tensors = _compute(
                    model, datasets[split.name], rows, config.data.micro_batch_size, dtype, bar
                )
                if saving is not None:
                    saving.result()
                if groups.tp.rank() == 0 and shard is not None:
                    own = {
                        name: tensor[: len(split.rows(shard))] for name, tensor in tensors.items()
                    }
                    saving = saver.submit(_save, directory / split.files[shard], own)
        if saving is not None:
            saving.result()


def _share(
    split: Split, missing: Sequence[int], rank: int, ranks: int, together: bool
) -> Iterator[tuple[int | None, np.ndarray]]:
    """Yield this rank's missing shards, each with the rows to run; the shard's own rows come first.

    Ranks that share experts (`together`) all run the same number of rows: a rank with a shorter
    shard repeats rows of it, and a rank without a shard (None) runs the rows of another rank.
    """
    for start in range(0, len(missing), ranks):
        turn = [split.rows(shard) for shard in missing[start : start + ranks]]
        shard = missing[start + rank] if rank < len(turn) else None
        if together or shard is not None:
            rows = turn[0 if shard is None else rank]
            yield shard, np.resize(rows, max(map(len, turn)) if together else len(rows))


def _compute(
    model: HybridModel,
    dataset: PackedDataset,
    rows: np.ndarray,
    size: int,
    dtype: torch.dtype,
    bar: tqdm,
) -> dict[str, Tensor]:
    """Compute a shard's tensors. All micro-batches have the same size, since another size may round
    differently."""
    device = next(model.parameters()).device
    parts = []
    for start in range(0, len(rows), size):
        wanted = rows[start : start + size]
        batch = dataset.batch(np.resize(wanted, size)).to(device)
        hidden = gather_sequence(model, base_states(model, replace(batch, hidden=None)))
        states = HiddenStates.encode(hidden.transpose(0, 1)[: len(wanted)], dtype)
        if bad := [int(row) for row, good in zip(wanted, states.finite(), strict=True) if not good]:
            raise MtpkitError(
                f"the base's hidden states of sequence {listed(bad)} hold NaN or infinity in"
                f" {str(dtype)[6:]} and are not cached; look into its weights, or set cache_dtype"
                " or dtype to float32"
            )
        parts.append(states.map(lambda tensor: tensor.cpu()))
        bar.update(len(wanted) * dataset.sequence_length)
    tensors = {"hidden": torch.cat([part.values for part in parts])}
    scales = [part.scale for part in parts if part.scale is not None]
    return tensors | ({"scale": torch.cat(scales)} if scales else {})


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    with staged_file(path) as staging:
        save_file(tensors, staging)
