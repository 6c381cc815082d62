"""Checkpoints of a training run: every rank saves its part, and an iteration appears whole or not
at all.

`RUN/mtpkit.json`, `config.json`, `tokenizer.json`, ... go with the weights; `RUN/iter_0000100/` is
a `torch_dist` checkpoint of model, optimizer and common state;
`RUN/latest_checkpointed_iteration.txt` is replaced last.

If the ranks do not save the frozen base, its tensors are copied once from its model directory, one
at a time and in their stored dtypes, into separate files beside those of the ranks:
`base_0.distcp`, ... Later checkpoints of the run hold hard links to these files, so every
checkpoint is complete and the base is on disk only once. The base need not be in memory.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pickle
import shutil
import warnings
from collections.abc import Container, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.safe_globals import register_safe_globals
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mtpkit.checkpoint.directory import (
    OWN_CONFIG,
    RELEASE,
    TRACKER,
    HFDirectory,
    ModelDirectory,
    find_torch_dist,
    iteration_name,
    latest_iteration,
    open_directory,
)
from mtpkit.checkpoint.kv_scales import is_kv_scale
from mtpkit.checkpoint.layouts.huggingface import copy_companions
from mtpkit.checkpoint.layouts.megatron import split_slice
from mtpkit.checkpoint.layouts.torch_dist import COMMON_STATE, MegatronReader
from mtpkit.checkpoint.layouts.torch_dist_index import INDEX, read_index
from mtpkit.checkpoint.layouts.torch_dist_write import CHECKPOINT_VERSION, write_megatron
from mtpkit.checkpoint.load import unchanged_base
from mtpkit.checkpoint.matrices import SomeWeights
from mtpkit.checkpoint.original import keep_original, link_original
from mtpkit.checkpoint.parts import Parts, scale_shapes_of, stored_parts
from mtpkit.checkpoint.tensors import (
    ANOTHER_COPY,
    FLOATS,
    SeveralSources,
    Shape,
    is_finite,
    refuse_not_finite,
    require_same_names,
)
from mtpkit.checkpoint.waiting import quantized_linears
from mtpkit.config import ModelConfig
from mtpkit.errors import UserError, listed
from mtpkit.files import (
    copy_file,
    fsync_tree,
    refuse_broken_links,
    replace_directory,
    require_file,
    storage_errors,
    write_file,
)
from mtpkit.platform import on_first_rank, save_checkpoints_in_threads

# torch warns of a class that megatron-core, not mtpkit, chose.
warnings.filterwarnings("ignore", message="Please use DTensor", category=FutureWarning)
# Every save would log the advice to use an asynchronous writer, but saves here are synchronous.
logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)
save_checkpoints_in_threads()

WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Environment variable that makes `torch.load` unpickle only allowed kinds of objects."""

PREFIX = "base_"
"""Name prefix of the files that hold only the base."""

DIVERGED = "the training diverged: lower the learning rate, and go on from an earlier checkpoint"
"""Advice if weights to be saved are not finite."""


def save_model(
    model: HybridModel,
    directory: Path | str,
    companions: Path | str | ModelDirectory | None = None,
) -> None:
    """Save a model's weights as the release of `directory`, with its config and the tokenizer found
    in `companions`.

    Tensors of the base that were loaded from `companions` and have not changed keep their dtypes
    from there, whatever dtype the model has; quantised ones always come from there. Collective:
    every rank calls it. Errors as in `save_checkpoint`.

    Raises:
        UserError: weights are quantised that do not come from `companions`.
    """
    quantized = quantized_linears(model)
    if companions is not None:
        quantized = [name for name in quantized if name.startswith("mtp.")]
    if quantized:
        raise UserError(
            f"{directory} is not written: the model's weights are quantised ({listed(quantized)});"
            " convert the directory that it was loaded from"
        )
    state = model.sharded_state_dict()
    source = None if companions is None else open_directory(companions)
    stored = set() if source is None else unchanged_base(model, source)
    # What has not changed comes from `companions`, in the dtypes that it is stored in there; the
    # model may have been loaded in another one.
    state = {
        name: part
        for name, part in state.items()
        if not (keys := _tensor_keys(part)) or keys - stored
    }
    base = source if stored else None
    save_checkpoint(directory, None, state, {}, model.mtpkit_config, source, base)


def _tensor_keys(part: object) -> set[str]:
    """Keys on disk of the tensors of an entry of a sharded state dict."""
    return {
        t.key for t in nested_values(load_preprocess({"": part})[0]) if isinstance(t, ShardedTensor)
    }


def save_checkpoint(
    directory: Path | str,
    iteration: int | None,
    sharded_state_dict: Mapping[str, object],
    common_state: Mapping[str, object],
    config: ModelConfig,
    companions: Path | str | ModelDirectory | None = None,
    base: Path | str | ModelDirectory | None = None,
) -> Path:
    """Save one iteration of a run (None: a release) and make it the latest. Collective: every rank
    calls it.

    Args:
        sharded_state_dict: megatron-core's, of the model and the optimizer; any nesting.
        common_state: values that are equal on all ranks, such as the iteration and the schedule.
        companions: model directory whose tokenizer and config.json are copied along.
        base: model directory of the base, whose tensors are added where `sharded_state_dict` lacks
            them.

    Returns:
        The directory of the iteration.

    Raises:
        StorageError: writing failed, for instance on a full disk; the previous iteration stays the
            latest.
        UserError: the base cannot be read, or the state is not finite; the previous iteration stays
            the latest.
    """
    directory = Path(directory)
    target = directory / iteration_name(iteration)
    _require_finite(f"{target} is not written", sharded_state_dict, DIVERGED)
    staging = directory / f".{target.name}.writing"
    with storage_errors(target):
        try:
            on_first_rank(lambda: _prepare(staging))
            # megatron-core writes into the staging directory with all ranks; only then does the
            # first rank make it visible.
            state = {**CHECKPOINT_VERSION, **common_state, **sharded_state_dict}
            dist_checkpointing.save(state, str(staging))
            if base is not None:
                on_first_rank(lambda: _add_base(staging, target, base))
            on_first_rank(lambda: _publish(staging, target, iteration, config, companions))
        except BaseException:
            if dist.get_rank() == 0:
                shutil.rmtree(staging, ignore_errors=True)
                with contextlib.suppress(OSError):
                    directory.rmdir()  # removes the directory if this was its first checkpoint
            raise
    return target


def _prepare(staging: Path) -> None:
    refuse_broken_links(staging)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)


def _publish(
    staging: Path,
    target: Path,
    iteration: int | None,
    config: ModelConfig,
    companions: Path | str | ModelDirectory | None,
) -> None:
    """Put the checkpoint in place. The tracker file comes last: until then the previous iteration
    is the latest."""
    run = target.parent
    source = None if companions is None else open_directory(companions)
    if source is not None and source.companions.resolve() != run.resolve():
        place = source.companions
        copy_companions(place, run)
        _copy_original(source, run)
        if (place / "config.json").exists():
            copy_file(place / "config.json", run / "config.json")
    write_file(run / OWN_CONFIG, json.dumps(config.to_dict(), indent=2) + "\n")
    # The tracker may only name data that a power failure cannot take away.
    fsync_tree(staging)
    replace_directory(staging, target)
    write_file(run / TRACKER, RELEASE if iteration is None else str(iteration))


def _copy_original(source: ModelDirectory, run: Path) -> None:
    """Copy to a run, once, what a directory keeps of its original (see
    `mtpkit.checkpoint.original`)."""
    if not isinstance(source, HFDirectory):
        link_original(source.companions, run)
    elif not (run / OWN_CONFIG).exists():
        scale_shapes = scale_shapes_of(source.matrices, source.reader.tensors)
        keep_original(source.reader, source.table, source.stored, scale_shapes, run)


def _add_base(staging: Path, target: Path, source: Path | str | ModelDirectory) -> None:
    """Add the tensors of the base that a saved checkpoint lacks, in the dtypes in which the base is
    stored.

    The files of the base in the run's newest checkpoint are linked. Without such files, the base is
    read from `source`, a model directory of either layout, whose heads are left out.
    """
    with storage_errors(target):  # its errors can be sent to all ranks, unlike torch's
        # megatron-core's index lists what ranks saved; the base's files are added to it.
        own = read_index(staging)
        iteration = latest_iteration(target.parent)
        previous = None if iteration is None else target.parent / iteration_name(iteration)
        base = _link_base(staging, previous) or _write_base(staging, open_directory(source), own)
        own.state_dict_metadata |= base.state_dict_metadata
        own.storage_data = {**own.storage_data, **base.storage_data}
        with (staging / INDEX).open("wb") as file:
            pickle.dump(own, file)


def _write_base(directory: Path, source: ModelDirectory, own: Metadata) -> Metadata:
    """Write the base's files into a checkpoint with the index `own`, quantised matrices as they are
    stored; return the index of their tensors."""
    weights = stored_base(source, own.state_dict_metadata.keys())
    base = SeveralSources(weights, source.kv_scales)
    base.tensors = {
        name: info
        for name, info in base.tensors.items()
        if name in weights.tensors or _is_of_base(name, own.state_dict_metadata)
    }
    if not base.tensors:
        return Metadata({}, storage_data={})
    staging = directory / ".base"
    staging.mkdir()
    write_megatron(staging, base, {})
    names = {
        path.name: f"{PREFIX}{number}.distcp"
        for number, path in enumerate(sorted(staging.glob("*.distcp")))
    }
    written = read_index(staging)
    for old, new in names.items():
        # The writer's names are those of the ranks' files.
        (staging / old).rename(directory / new)
    shutil.rmtree(staging)
    storage = {
        index: dataclasses.replace(place, relative_path=names[place.relative_path])
        for index, place in written.storage_data.items()
        # The ranks wrote the common state already.
        if index.fqn != COMMON_STATE
    }
    return _part(written, storage)


def stored_base(source: ModelDirectory, without: Container[str] = ()) -> Parts:
    """The weights of a directory's base as a run writes them: quantised matrices as they are
    stored, if need be with a scale per row in place of those of blocks.

    Args:
        without: keys on disk of tensors to leave out.

    Raises:
        UserError: quantised matrices cannot be kept in Megatron's layout; the message names them.
    """
    whole = source.weights(expand_scales=True)
    names = {name for name in whole.tensors if _is_of_base(name, without)}
    base = SomeWeights(whole, names)
    return stored_parts(base, source.recipe if base.matrices else None, source.path)


def _is_of_base(name: str, without: Container[str]) -> bool:
    return split_slice(name)[0] not in without and not name.startswith("mtp.")


def _link_base(directory: Path, previous: Path | None) -> Metadata | None:
    """Link the base's files of the checkpoint `previous` and return their index; None if it has
    none."""
    # Only the first checkpoint of a run writes the base; a resumed run finds the files there, too.
    files = sorted(previous.glob(f"{PREFIX}*.distcp")) if previous is not None else []
    if previous is None or not files:
        return None
    for file in files:
        try:
            os.link(file, directory / file.name)
        except OSError:  # a file system without hard links
            shutil.copyfile(file, directory / file.name)
    before = read_index(previous)
    places = before.storage_data.items()
    return _part(
        before, {index: place for index, place in places if place.relative_path.startswith(PREFIX)}
    )


def _part(metadata: Metadata, storage: Mapping[MetadataIndex, object]) -> Metadata:
    """The part of an index about the entries that are stored in these places."""
    names = {index.fqn for index in storage}
    entries = {name: entry for name, entry in metadata.state_dict_metadata.items() if name in names}
    return Metadata(entries, storage_data=storage)


def load_checkpoint(
    directory: Path | str, sharded_state_dict: Mapping[str, object], partial: bool = False
) -> dict[str, Any]:
    """Load the latest iteration of a run, at whatever parallelism it was saved. Collective: every
    rank calls it.

    Args:
        sharded_state_dict: what to load, as given to `save_checkpoint`; its tensors are
            overwritten.
        partial: ignore tensors in the checkpoint that `sharded_state_dict` lacks.

    Returns:
        `sharded_state_dict`'s nesting with plain tensors, and the entries of the common state
        beside it.

    Raises:
        UserError: tensors are missing, unexpected, of another shape or not finite; or a file is
            damaged.
    """
    path = find_torch_dist(directory)
    require_file(path / "metadata.json")  # megatron-core opens this file
    stored = MegatronReader(path)
    # Checkpoints of models without fp8 may lack these objects, which megatron-core asks for.
    asked = _without_absent_extra_states(sharded_state_dict, stored.keys)
    flat = list(nested_values(load_preprocess(asked)[0]))
    # What one rank does not ask for is another's, so that only all ranks know what is unexpected.
    shapes = _over_all_ranks(
        {t.key: tuple(t.global_shape) for t in flat if isinstance(t, ShardedTensor)}
    )
    objects = _over_all_ranks({o.unique_key: () for o in flat if isinstance(o, ShardedObject)})
    if missing := objects.keys() - stored.keys:
        raise UserError(f"{path}: missing {listed(sorted(missing))}")
    # The scales of a base stay beside its weights, but models hold them as numbers.
    held = {name: info for name, info in stored.on_disk.items() if not is_kv_scale(name)}
    require_same_names(path, held, shapes, extra_ok=partial)
    try:
        with _without_code():
            state = dist_checkpointing.load(asked, str(path))
    except (Exception, CheckpointException) as error:  # torch derives its own from BaseException
        reason = next(
            (line for line in reversed(str(error).splitlines()) if line), type(error).__name__
        )
        raise UserError(f"{path} is damaged or cut off ({reason})") from error
    _require_finite(path, asked)
    return state


@contextlib.contextmanager
def _without_code() -> Iterator[None]:
    """Let torch load only the kinds of objects that megatron-core saves, because other pickles can
    run code."""
    register_safe_globals()
    before = os.environ.get(WEIGHTS_ONLY)
    os.environ[WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        os.environ.pop(WEIGHTS_ONLY)
        if before is not None:
            os.environ[WEIGHTS_ONLY] = before


def _require_finite(
    where: Path | str, sharded_state_dict: Mapping[str, object], advice: str = ANOTHER_COPY
) -> None:
    """Refuse a state that holds NaN or infinity on any rank, with the same error on every rank.
    Collective."""
    shards = nested_values(load_preprocess(dict(sharded_state_dict))[0])
    held = [
        shard for shard in shards if isinstance(shard, ShardedTensor) and shard.data is not None
    ]
    names: dict[str, Shape] = {
        shard.key: () for shard in held if shard.data.dtype in FLOATS and not is_finite(shard.data)
    }
    refuse_not_finite(where, sorted(_over_all_ranks(names)), advice)


def _without_absent_extra_states(
    sharded_state_dict: Mapping[str, object], stored: Set[str]
) -> dict[str, object]:
    """Replace `_extra_state` objects that the checkpoint lacks with None; they hold fp8 scales or
    nothing."""

    def replace(value: object) -> object:
        if (
            isinstance(value, ShardedObject)
            and value.key.endswith("_extra_state")
            and value.unique_key not in stored
        ):
            return LocalNonpersistentObject(None)
        return value

    return dict_list_map_outplace(replace, dict(sharded_state_dict))


def _over_all_ranks(names: dict[str, Shape]) -> dict[str, Shape]:
    """The union of every rank's dictionary."""
    gathered: list[dict[str, Shape]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, names)
    return {key: shape for part in gathered for key, shape in part.items()}
