"""Formats in which heads are written: as a directory holds them, in bf16, or quantised as the
settings of the base can say, so that servers read them.

A format is refused if servers would need what training does not know, such as scales of inputs from
calibration data.
"""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NoReturn

import torch
from torch import Tensor

from mtpkit.checkpoint.directory import HFDirectory, MegatronDirectory, ModelDirectory
from mtpkit.checkpoint.families.serving import OUTPUT_COPY, SERVERS, Serving
from mtpkit.checkpoint.ignored import FUSED, IgnoreList, linears, module_of
from mtpkit.checkpoint.matrices import Weights, part_name, split_part
from mtpkit.checkpoint.parts import scale_shapes_of
from mtpkit.checkpoint.quantized import CONFIG
from mtpkit.checkpoint.recipe import ALGORITHMS, Rule, read_recipe
from mtpkit.checkpoint.tensors import TensorInfo
from mtpkit.checkpoint.values import Values
from mtpkit.errors import UserError, listed, shown
from mtpkit.model.formats import Format, Fp8, Int4, Nvfp4, Part, Quantized

HeadFormat = Literal["auto", "bf16", "fp8", "nvfp4", "int4"]
"""`auto`: as the directory holds the heads, which are bf16 after training."""

_WITHOUT_CALIBRATION: Mapping[tuple[str, str], str] = {
    ("FP8_PB_WO", "fp8"): "FP8_PB_WO",
    ("FP8_BLOCK_SCALES", "fp8"): "FP8_BLOCK_SCALES",
    ("FP8_PER_CHANNEL_PER_TOKEN", "fp8"): "FP8_PER_CHANNEL_PER_TOKEN",
    ("W4A16_NVFP4", "nvfp4"): "W4A16_NVFP4",
    ("MIXED_PRECISION", "fp8"): "FP8_PB_WO",
    ("MIXED_PRECISION", "nvfp4"): "W4A16_NVFP4",
}
"""(ModelOpt's `quant_algo` of a base, format) -> algorithm of the heads. FP8 and NVFP4 themselves
need a scale of the inputs of each matrix."""
_STAYS = rf"\.(eh_proj|fc|input_proj)$|{OUTPUT_COPY}"
"""Modules of heads that stay as they are, as in published checkpoints: what joins embedding and
hidden state, and the copy of the output layer, which is the base's."""
_SHAPES: Mapping[str, str] = {
    "FP8_PB_WO": "blocks",
    "FP8_BLOCK_SCALES": "blocks",
    "FP8_PER_CHANNEL_PER_TOKEN": "flat",
}
"""Algorithm -> shape that servers expect of `weight_scale`, see `shapes_of`."""


@dataclass(frozen=True)
class WrittenHeads:
    """A model's weights under Hugging Face names, with the heads in the format to be written."""

    weights: Weights
    heads: Set[str]
    """Names of the tensors of heads."""
    algorithms: Mapping[str, str]
    """Module of each quantised matrix of the heads -> ModelOpt's algorithm for it; empty with other
    methods."""
    scale_shapes: Mapping[str, str]
    """Unusual shapes of parts that are quantised now, see `mtpkit.checkpoint.parts`."""

    def plain(self, facts: Serving) -> list[str]:
        """The modules of the heads that are not quantised, although servers may do that."""
        shapes = {name: self.weights.tensors[name].shape for name in self.heads}
        return [module for module in linears(shapes, facts) if module not in self.algorithms]


def holds_quantized_heads(directory: ModelDirectory) -> bool:
    """Whether some matrix of the heads is stored quantised; raises as the directory's `reader` and
    `matrices` do."""
    if isinstance(directory, HFDirectory):
        return not directory.matrices.keys().isdisjoint(directory.table.mtp_names(directory.stored))
    assert isinstance(directory, MegatronDirectory)
    names = directory.reader.tensors
    return any(name.startswith("mtp.") and split_part(name)[1] != "weight" for name in names)


def scale_shapes_in(directory: ModelDirectory) -> Mapping[str, str]:
    """Unusual shapes of parts of quantised matrices, see `mtpkit.checkpoint.parts`."""
    if isinstance(directory, HFDirectory):
        return scale_shapes_of(directory.matrices, directory.reader.tensors)
    assert isinstance(directory, MegatronDirectory)
    return directory.stored.scale_shapes


def written_heads(
    weights: Weights,
    heads: Set[str],
    head_format: HeadFormat,
    settings: object,
    facts: Serving,
    letters: int,
    where: object,
) -> WrittenHeads:
    """Give the heads the format to be written.

    Args:
        weights: under Hugging Face names.
        heads: names of the tensors of heads.
        settings: the base's `quantization_config`, or ModelOpt's; None: it is not quantised.
        facts: facts about the family.
        letters: length of the base's pattern.
        where: the base, for messages.

    Raises:
        UserError: the base's settings cannot say that heads have this format.
    """
    kept = {name: each for name, each in weights.matrices.items() if tensor_of(name) in heads}
    if head_format == "auto":
        told = {module_of(tensor_of(n)): _algorithm_of(each.format) for n, each in kept.items()}
        return WrittenHeads(weights, heads, told, {})
    if head_format == "bf16":
        return WrittenHeads(_HeadWeights(weights, {}, kept.keys()), heads, {}, {})

    shapes = {name: weights.tensors[name].shape for name in heads}
    chosen, algorithm = _format_of(head_format, settings, where)
    assert isinstance(settings, Mapping)
    ignored = IgnoreList.of(settings, facts, letters)
    assert ignored is not None
    modules = linears(shapes, facts)
    plain = {module for server in SERVERS for module in ignored.built_plain(server, modules)}
    plain |= {module for module in modules if re.search(_STAYS, module)}
    names = [
        f"{module}.weight" if f"{module}.weight" in shapes else module
        for module in modules
        if module not in plain
    ]
    _refuse_sizes(head_format, chosen, {name: shapes[name] for name in names}, where)
    parts = {
        part_name(name, part): way
        for name in names
        for part in chosen.parts()
        if (way := _shape_of(chosen, part, algorithm))
    }
    own = _HeadWeights(weights, dict.fromkeys(names, chosen), kept.keys())
    return WrittenHeads(own, heads, {module_of(name): algorithm for name in names}, parts)


def _shape_of(kind: Format, part: str, algorithm: str) -> str:
    """The shape that servers expect of a part, see `shapes_of`; empty: the usual one."""
    if _has_one(kind.parts()[part]):
        return "scalar" if algorithm else "flat"
    return _SHAPES.get(algorithm, "") if part == "weight_scale" else ""


def _has_one(part: Part) -> bool:
    """Whether a part has one entry for the whole matrix."""
    return part.rows is None and part.columns is None


def tensor_of(matrix: str) -> str:
    """The tensor of a matrix, which may be one of a stack."""
    return matrix.rpartition("[")[0] if matrix.endswith("]") else matrix


def _algorithm_of(kind: Format) -> str:
    """ModelOpt's algorithm of a format; empty if it has none."""
    if isinstance(kind, Nvfp4):
        return "NVFP4" if kind.input_scale else "W4A16_NVFP4"
    if not isinstance(kind, Fp8):
        return ""
    rules = {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"}
    wanted = kind.rows, kind.columns, kind.inputs
    return next(
        (
            name
            for name, rule in ALGORITHMS.items()
            if name in rules and (rule.rows, rule.columns, rule.inputs) == wanted
        ),
        "",
    )


def _format_of(head_format: str, settings: object, where: object) -> tuple[Format, str]:
    """(format, ModelOpt's algorithm if it is ModelOpt's) of heads.

    Raises:
        UserError: the base's settings cannot say it.
    """

    def refuse(why: str) -> NoReturn:
        raise UserError(
            f"{where}: heads cannot be written in {head_format}: {why}; leave --head-format out to"
            " write them as they are"
        )

    if not isinstance(settings, Mapping):
        refuse("the base is not quantised, and servers quantise heads as they do the base")
    method = str(settings.get("quant_method"))
    file = Values({CONFIG: settings}, str(where))
    recipe = read_recipe(file)
    written = method in ("fp8", "compressed-tensors") or method.startswith("modelopt")
    if recipe is None or recipe.only_kv or not written:
        refuse(f"this is not supported on a base with quant_method {shown(method)}")
    if method.startswith("modelopt"):
        base = recipe.name.removeprefix("modelopt ")
        algorithm = _WITHOUT_CALIBRATION.get((base, head_format))
        if algorithm is None:
            refuse(
                f"quant_algo {base} has no {head_format} without scales of inputs, which come from"
                " calibration"
            )
        return _of_rule(ALGORITHMS[algorithm], "weight_scale", packed=False), algorithm
    if settings.get("scale_fmt") == "ue8m0":
        refuse("the base's scales are powers of two (scale_fmt 'ue8m0')")
    rules = [rule for rule in recipe.rules if rule.codes == head_format]
    if not rules:
        kinds = listed(sorted({rule.codes for rule in recipe.rules}))
        refuse(f"{recipe.name} has {kinds} alone")
    if len(recipe.rules) > 1 or rules[0].patterns:
        refuse(f"the groups of {recipe.name} are about certain modules of the base")
    if rules[0].inputs.rule == "static" or _quantises_inputs_to_fp4(settings):
        refuse(f"{recipe.name} has scales of inputs, which come from calibration")
    if head_format == "int4" and (rules[0].columns is None or _has_zero_points(settings)):
        refuse("only groups without zero points are written")
    scale = "weight_scale_inv" if method == "fp8" else "weight_scale"
    return _of_rule(rules[0], scale, packed=True), ""


def _of_rule(rule: Rule, scale: str, packed: bool) -> Format:
    """The format of matrices to which a rule applies."""
    if rule.codes == "fp8":
        return Fp8(rows=rule.rows, columns=rule.columns, scale=scale, inputs=rule.inputs)
    if rule.codes == "int4":
        assert rule.columns is not None
        return Int4(columns=rule.columns)
    if packed:
        return Nvfp4(packed="weight_packed", whole="weight_global_scale")
    return Nvfp4()


def _quantises_inputs_to_fp4(settings: Mapping[str, object]) -> bool:
    return any(told.get("num_bits") == 4 for told in _of_groups(settings, "input_activations"))


def _has_zero_points(settings: Mapping[str, object]) -> bool:
    return any(told.get("symmetric") is False for told in _of_groups(settings, "weights"))


def _of_groups(settings: Mapping[str, object], key: str) -> Iterator[Mapping[str, object]]:
    """What the groups of compressed-tensors say under a key."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and isinstance(found := group.get(key), Mapping):
            yield found


def _refuse_sizes(
    head_format: str, kind: Format, shapes: Mapping[str, Sequence[int]], where: object
) -> None:
    """Refuse matrices that the format does not fit.

    Raises:
        UserError: no matrix is left, or some do not fit; the message names them.
    """
    advice = "leave --head-format out to write the heads as they are"
    if not shapes:
        raise UserError(
            f"{where}: servers build these heads without quantisation, so that they cannot be"
            f" written in {head_format}: {advice}"
        )
    packed = [name for name, shape in shapes.items() if len(shape) != 2]
    if packed:
        raise UserError(
            f"{where}: {listed(packed)} hold all experts in one tensor, which servers read in bf16"
            f" alone: {advice}"
        )
    # Blocks of fp8 may be partial at the edges, except that ModelOpt's cannot at the right.
    whole = kind.scale != "weight_scale_inv" if isinstance(kind, Fp8) else True
    columns = max(part.columns or 1 for part in kind.parts().values())
    odd = [f"{name} {list(shape)}" for name, shape in shapes.items() if shape[1] % columns]
    if whole and odd:
        raise UserError(
            f"{where}: {listed(odd)}: columns must be a multiple of {columns} in {head_format}:"
            f" {advice}"
        )


class _HeadWeights(Weights):
    """Weights of which some are quantised when they are read, and some stored ones widened.

    Args:
        formats: the matrices to quantise.
        widened: quantised matrices to give widened, or to quantise anew.
    """

    def __init__(self, source: Weights, formats: Mapping[str, Format], widened: Set[str]) -> None:
        self._source = source
        self._formats = formats
        self._widened = widened
        self.tensors: dict[str, TensorInfo] = source.tensors

    @cached_property
    def matrices(self) -> Mapping[str, Quantized]:
        kept = {
            name: matrix
            for name, matrix in self._source.matrices.items()
            if name not in self._widened
        }
        return kept | {name: self._blank(name, kind) for name, kind in self._formats.items()}

    def _blank(self, name: str, kind: Format) -> Quantized:
        rows, columns = self.tensors[name].shape
        parts = {
            part: torch.empty(each.shape((rows, columns)), dtype=each.dtypes[0], device="meta")
            for part, each in kind.parts().items()
        }
        return Quantized(kind, (rows, columns), parts)

    def quantized(self, name: str) -> Quantized:
        kind = self._formats.get(name)
        if kind is None:
            return self._source.quantized(name)
        shared = any(map(_has_one, kind.parts().values()))
        names = [*self._joined(name)] if shared else [name]
        weight = torch.cat([self._source.read(each) for each in names])
        whole = Quantized(kind, tuple(weight.shape), kind.quantize(weight))
        sizes = [self.tensors[each].shape[0] for each in names]
        start = sum(sizes[: names.index(name)])
        return whole.narrow_rows(start, start + self.tensors[name].shape[0])

    def _joined(self, name: str) -> Iterator[str]:
        """The matrices that servers join with this one. Of scales of whole matrices they take the
        largest, for NVFP4 without changing the codes: so all of them have the same."""
        start, dot, last = module_of(name).rpartition(".")
        for parts in FUSED.values():
            names = [f"{start}{dot}{part}.weight" for part in parts]
            if last in parts and all(each in self._formats for each in names):
                yield from names
                return
        yield name

    def read(self, name: str) -> Tensor:
        return self._source.read(name)

    def require_finite(self) -> None:
        self._source.require_finite()
