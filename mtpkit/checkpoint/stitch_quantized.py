"""Support for quantised checkpoints in `stitch` without reading weights: tensor names, list of
unquantised modules."""

import logging
from collections.abc import Mapping

import torch

from mtpkit.checkpoint.directory import MODELOPT, HFDirectory
from mtpkit.checkpoint.ignored import Stitching, module_of
from mtpkit.checkpoint.matrices import StoredMatrices, find_matrices
from mtpkit.checkpoint.quantized import CONFIG, find_quantized, read_block_fp8
from mtpkit.checkpoint.recipe import read_recipe, unread
from mtpkit.checkpoint.tensors import TensorInfo, require_same_names
from mtpkit.checkpoint.values import Values
from mtpkit.errors import UserError, listed, raise_problems

_logger = logging.getLogger(__name__)


def check_base(source: HFDirectory) -> dict[str, frozenset[str]]:
    """Check that a checkpoint holds the tensors that its config calls for, under any quantisation,
    and warn of one that cannot be read.

    Returns:
        The names of quantised weights, each with the tensors stored beside or in place of it.

    Raises:
        UserError: tensors are missing, unexpected or of another shape, or scales of block fp8 do
            not fit; the message names them all.
    """
    found = source.reader
    expected = source.table.hf_shapes(source.stored)
    if source.quantization is None:
        require_same_names(source.path, found.tensors, expected)
        return {}
    quantized = find_quantized(found.tensors, expected)
    settings = Values(source.settings, source.path / "config.json")
    for text in unread(source.settings, source.modelopt, settings.where):
        _logger.warning("%s: %s", source.path, text)
    block = read_block_fp8(settings)
    tensors = found.tensors
    if block is not None:
        matrices = find_matrices(tensors, read_recipe(settings), source.path)
        tensors = StoredMatrices(found, matrices, torch.bfloat16).tensors
    apart = {} if block else quantized
    taken = apart.keys() | {name for names in apart.values() for name in names}
    plain = {name: info for name, info in tensors.items() if name not in taken}
    require_same_names(
        source.path, plain, {name: shape for name, shape in expected.items() if name not in apart}
    )
    return quantized


def list_heads(
    config: Mapping[str, object],
    own: Mapping[str, object] | None,
    modules: Stitching,
    only_incomplete: bool = False,
) -> dict[str, Mapping[str, object]]:
    """`config.json`, and ModelOpt's file if there is one, with the heads as their lists of
    unquantised modules must have them.

    Args:
        config: the `config.json` to change.
        own: ModelOpt's file.
        only_incomplete: change nothing where servers read the lists rightly already.
    """

    def listed_in(settings: Mapping[str, object]) -> Mapping[str, object]:
        complete = only_incomplete and modules.is_complete(settings)
        return settings if complete else modules.listed_in(settings)

    files: dict[str, Mapping[str, object]] = {"config.json": config}
    settings = config.get(CONFIG)
    if isinstance(settings, Mapping):
        files["config.json"] = {**config, CONFIG: listed_in(settings)}
    if own is not None:
        # the file leaves out the method, by which lists are read
        changed = listed_in({"quant_method": "modelopt", **own})
        files[MODELOPT] = {
            key: value for key, value in changed.items() if key != "quant_method" or key in own
        }
    return files


def check_heads(
    files: Mapping[str, Mapping[str, object]],
    tensors: Mapping[str, TensorInfo],
    modules: Stitching,
    where: object,
) -> None:
    """Check that settings say how the quantised matrices of heads are stored.

    Args:
        files: the result of `list_heads`.
        tensors: those of the heads, as they are written.
        where: the base, for messages.

    Raises:
        UserError: they do not.
    """
    if not modules.written:
        return
    config = files["config.json"]
    own = files.get(MODELOPT)
    told = [config.get(CONFIG), {"quant_method": "modelopt", **own} if own else None]
    hidden = {name for each in told if isinstance(each, Mapping) for name in modules.misread(each)}
    problem = f"servers would take {listed(sorted(hidden))} for unquantised" if hidden else ""
    if not problem:
        file = Values(config, "config.json")
        try:
            recipe = read_recipe(file, own)
            raise_problems(file.where, file.problems)
            found = find_matrices(tensors, recipe, "its settings")
        except UserError as error:
            problem = str(error)
        else:
            missed = modules.written.keys() - {module_of(name) for name in found}
            problem = f"its settings say nothing of {listed(sorted(missed))}" if missed else ""
    if problem:
        raise UserError(
            f"{where}: the heads are quantised in a way that this base cannot say ({problem});"
            " write them in bf16 by --head-format bf16"
        )
