"""Support for quantised checkpoints in `stitch` without reading weights: tensor names, list of
unquantised modules."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mtpkit.checkpoint.directory import (
    MODELOPT,
    hf_settings,
    modelopt_settings,
    quantization_settings,
)
from mtpkit.checkpoint.families.serving import Serving
from mtpkit.checkpoint.ignored import with_heads_listed
from mtpkit.checkpoint.quantized import CONFIG, Dequantized, find_quantized, read_block_fp8
from mtpkit.checkpoint.tensors import Shape, Tensors, require_same_names
from mtpkit.checkpoint.values import Values


def check_base(
    source: Path, found: Tensors, expected: Mapping[str, Shape]
) -> dict[str, frozenset[str]]:
    """Check that a checkpoint holds the tensors that its config calls for, under any quantisation.

    Returns:
        The names of quantised weights, each with the tensors stored beside or in place of it.

    Raises:
        UserError: tensors are missing, unexpected or of another shape, or scales of block fp8 do
            not fit; the message names them all.
    """
    if quantization_settings(source) is None:
        require_same_names(source, found.tensors, expected)
        return {}
    quantized = find_quantized(found.tensors, expected)
    block = read_block_fp8(Values(hf_settings(source), source / "config.json"))
    tensors = found.tensors if block is None else Dequantized(found, block, source).tensors
    apart = {} if block else quantized
    taken = apart.keys() | {name for names in apart.values() for name in names}
    plain = {name: info for name, info in tensors.items() if name not in taken}
    require_same_names(
        source, plain, {name: shape for name, shape in expected.items() if name not in apart}
    )
    return quantized


def list_heads(
    source: Path,
    config: Mapping[str, object],
    heads: Sequence[str],
    quantized: Sequence[str],
    plain: Sequence[str],
    facts: Serving,
    letters: int,
) -> dict[str, Mapping[str, object]]:
    """`config.json`, and ModelOpt's file if there is one, with the heads added to their lists of
    unquantised modules.

    Args:
        config: the `config.json` to change.
        heads: modules of the heads.
        quantized: modules of the base that are quantised.
        plain: matrices of the base that are not quantised.
        letters: length of the base's pattern.
    """

    def with_heads(settings: Mapping[str, object]) -> dict[str, object]:
        return with_heads_listed(settings, heads, quantized, plain, facts, letters)

    files: dict[str, Mapping[str, object]] = {"config.json": config}
    settings = config.get(CONFIG)
    if isinstance(settings, Mapping):
        files["config.json"] = {**config, CONFIG: with_heads(settings)}
    if (own := modelopt_settings(source)) is not None:
        changed = with_heads({"quant_method": "modelopt", **own})
        files[MODELOPT] = {
            key: value for key, value in changed.items() if key != "quant_method" or key in own
        }
    return files
