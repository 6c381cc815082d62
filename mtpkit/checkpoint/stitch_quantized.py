"""Support for quantised checkpoints in `stitch` without reading weights: tensor names, list of
unquantised modules."""

from collections.abc import Mapping

from mtpkit.checkpoint.directory import MODELOPT, HFDirectory
from mtpkit.checkpoint.ignored import Stitching
from mtpkit.checkpoint.quantized import CONFIG, Dequantized, find_quantized, read_block_fp8
from mtpkit.checkpoint.tensors import require_same_names
from mtpkit.checkpoint.values import Values


def check_base(source: HFDirectory) -> dict[str, frozenset[str]]:
    """Check that a checkpoint holds the tensors that its config calls for, under any quantisation.

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
    block = read_block_fp8(Values(source.settings, source.path / "config.json"))
    tensors = found.tensors if block is None else Dequantized(found, block, source.path).tensors
    apart = {} if block else quantized
    taken = apart.keys() | {name for names in apart.values() for name in names}
    plain = {name: info for name, info in tensors.items() if name not in taken}
    require_same_names(
        source.path, plain, {name: shape for name, shape in expected.items() if name not in apart}
    )
    return quantized


def list_heads(
    source: HFDirectory, config: Mapping[str, object], modules: Stitching
) -> dict[str, Mapping[str, object]]:
    """`config.json`, and ModelOpt's file if there is one, with the heads added to their lists of
    unquantised modules.

    Args:
        config: the `config.json` to change.
    """
    files: dict[str, Mapping[str, object]] = {"config.json": config}
    settings = config.get(CONFIG)
    if isinstance(settings, Mapping):
        files["config.json"] = {**config, CONFIG: modules.listed_in(settings)}
    if (own := source.modelopt) is not None:
        # the file leaves out the method, by which lists are read
        changed = modules.listed_in({"quant_method": "modelopt", **own})
        files[MODELOPT] = {
            key: value for key, value in changed.items() if key != "quant_method" or key in own
        }
    return files
