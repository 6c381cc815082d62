"""Quantisation as the settings of a checkpoint describe it: `quantization_config` of `config.json`,
and ModelOpt's file beside it.

Tensors decide how a matrix is stored, see `mtpkit.checkpoint.matrices`. Settings say what tensors
leave open, such as how inputs are quantised, and must agree with them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from mtpkit.checkpoint.quantized import CONFIG, FP8_METHOD, read_block_fp8
from mtpkit.checkpoint.values import Values
from mtpkit.errors import shown
from mtpkit.kernels.quantized import NOT_QUANTIZED, Inputs

_MIXED = "MIXED_PRECISION"
_OUTER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?")
"""Prefixes that the same module has in one file and lacks in another."""


@dataclass(frozen=True)
class Rule:
    """How the settings say that some matrices are quantised."""

    codes: str
    """Name of the format, see `Format.name`."""
    rows: int | None
    """Rows that share a scale; None: all."""
    columns: int | None
    """Columns that share a scale; None: all."""
    inputs: Inputs = NOT_QUANTIZED
    zero_offset: int = 0
    """See `Gptq.zero_offset`."""
    modules: frozenset[str] | None = None
    """Modules that the rule is about, without `_OUTER`; None: see `patterns`."""
    patterns: tuple[str, ...] = ()
    """Regular expressions for the names of modules, one of which must match; empty: the rule is
    about all modules, or those in `modules`."""

    def is_about(self, module: str) -> bool:
        """Whether the rule is about a module of a file."""
        if self.modules is not None:
            bare = _OUTER.sub("", module)
            # A name may stand for a whole stack of experts, or for all that is in a layer.
            places = bare.split(".")
            return any(".".join(places[:end]) in self.modules for end in range(1, len(places) + 1))
        return not self.patterns or any(re.match(each, module) for each in self.patterns)


@dataclass(frozen=True)
class Recipe:
    """The settings of a quantised checkpoint."""

    name: str
    """The method and what else identifies it, for messages."""
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    """Modules that the settings say are not quantised: names, patterns as of a shell, or regular
    expressions after `re:`."""
    kv_cache: str = ""
    """What servers should quantise keys and values to, such as FP8; empty: nothing is said."""

    @property
    def only_kv(self) -> bool:
        """Whether keys and values are quantised and no weights are."""
        return not self.rules

    def ignores(self, module: str) -> bool:
        """Whether the settings say that a module of a file is not quantised."""
        return any(
            re.match(entry[3:], module) if entry.startswith("re:") else fnmatch(module, entry)
            for entry in self.ignored
        )


ALGORITHMS = {
    "FP8": Rule("fp8", None, None, Inputs("static")),
    "FP8_PER_CHANNEL_PER_TOKEN": Rule("fp8", 1, None, Inputs("token")),
    "FP8_PB_WO": Rule("fp8", 128, 128, Inputs("group", 128)),
    "FP8_BLOCK_SCALES": Rule("fp8", 128, 128, Inputs("group", 128)),
    "NVFP4": Rule("nvfp4", 1, 16),
    "W4A16_NVFP4": Rule("nvfp4", 1, 16),
}
"""ModelOpt's `quant_algo` -> its rule. In spite of its name, servers quantise the inputs of
`FP8_PB_WO`."""


def read_recipe(file: Values, own: Mapping[str, object] | None = None) -> Recipe | None:
    """The quantisation of a checkpoint; None if its settings have none, or have a problem, which is
    recorded.

    Args:
        file: the `config.json`.
        own: ModelOpt's settings beside it.
    """
    found = file.get(CONFIG)
    if found is None and own is None:
        return None
    if isinstance(found, Mapping) and found.get("quant_method") == "compressed-tensors":
        return _compressed_tensors(file, found)
    if found is None or _is_modelopt(found):
        return _modelopt(file, found, own)
    if isinstance(found, Mapping) and found.get("quant_method") in ("awq", "gptq"):
        return _columnwise(file, found)
    block = read_block_fp8(file)
    if block is None:
        return None
    assert isinstance(found, Mapping)
    inputs = Inputs("group", block.columns)
    ignored = found.get("modules_to_not_convert")
    rule = Rule("fp8", block.rows, block.columns, inputs)
    return Recipe(f"{FP8_METHOD} in blocks", (rule,), _texts(ignored))


def _columnwise(file: Values, found: Mapping[str, object]) -> Recipe | None:
    """The settings of AWQ or GPTQ."""
    method = str(found["quant_method"])
    group = found.get("group_size", found.get("q_group_size", 128))
    kind = str(found.get("checkpoint_format", "gptq"))
    problems = []
    if found.get("bits", found.get("w_bit")) != 4:
        problems.append(f"bits {shown(found.get('bits', found.get('w_bit')))}")
    if type(group) is not int or not (group == -1 or group > 0):
        problems.append(f"group_size {shown(group)}")
    if method == "awq" and str(found.get("version", "gemm")).lower() != "gemm":
        problems.append(f"version {shown(found['version'])}")
    if method == "awq" and not found.get("zero_point", True):
        problems.append("zero_point false")
    if kind not in ("gptq", "gptq_v2"):
        problems.append(f"checkpoint_format {shown(kind)}")
    # GPTQ's list of modules that are not quantised: patterns after a minus. Others change settings.
    dynamic = found.get("dynamic") or {}
    left_out = [str(entry) for entry in dynamic] if isinstance(dynamic, Mapping) else [""]
    if not all(entry.startswith("-:") for entry in left_out):
        problems.append(f"dynamic {shown(dynamic)}")
    file.problems.extend(_unsupported(f"{method} with {problem}") for problem in problems)
    if problems:
        return None
    assert isinstance(group, int)
    offset = 1 if (method, kind) == ("gptq", "gptq") else 0
    rule = Rule(method, 1, None if group == -1 else group, zero_offset=offset)
    patterns = tuple(f"re:{entry.removeprefix('-:')}" for entry in left_out)
    return Recipe(method, (rule,), _texts(found.get("modules_to_not_convert")) + patterns)


def _texts(found: object) -> tuple[str, ...]:
    """The texts in a list; none if it is no list."""
    entries = found if isinstance(found, list) else []
    return tuple(entry for entry in entries if isinstance(entry, str))


def _is_modelopt(found: object) -> bool:
    return isinstance(found, Mapping) and str(found.get("quant_method")).startswith("modelopt")


def _modelopt(file: Values, found: object, own: Mapping[str, object] | None) -> Recipe | None:
    """ModelOpt's settings. The two places may be nested in `quantization`, and must agree."""
    places = []
    for each in (found, own):
        if isinstance(each, Mapping):
            nested = each.get("quantization")
            places.append(nested if isinstance(nested, Mapping) else each)
    algorithms = {str(each["quant_algo"]).upper() for each in places if each.get("quant_algo")}
    kv_cache = _kv_cache(places)
    if kv_cache and not algorithms:
        return Recipe("modelopt", (), kv_cache=kv_cache)
    if len(algorithms) != 1:
        file.problems.append(
            f"{CONFIG} and hf_quant_config.json contradict each other: quant_algo"
            f" {' and '.join(sorted(algorithms))}"
            if algorithms
            else f"{CONFIG} {shown(found)} names no quant_algo"
        )
        return None
    (algorithm,) = algorithms
    ignored = {
        entry
        for each in places
        for key in ("ignore", "exclude_modules")
        for entry in _texts(each.get(key))
    }
    if algorithm != _MIXED:
        if algorithm not in ALGORITHMS:
            file.problems.append(_unsupported(f"quant_algo {shown(algorithm)}"))
            return None
        rule = ALGORITHMS[algorithm]
        return Recipe(f"modelopt {algorithm}", (rule,), tuple(sorted(ignored)), kv_cache)

    modules: dict[str, set[str]] = {}
    for each in places:
        layers = each.get("quantized_layers")
        for module, told in layers.items() if isinstance(layers, Mapping) else ():
            inner = told.get("quant_algo") if isinstance(told, Mapping) else told
            modules.setdefault(str(inner).upper(), set()).add(_OUTER.sub("", str(module)))
    odd = sorted(modules.keys() - ALGORITHMS.keys())
    if odd or not modules:
        told = f"quantized_layers with {shown(', '.join(odd))}" if odd else "no quantized_layers"
        file.problems.append(_unsupported(f"quant_algo {_MIXED} with {told}"))
        return None
    rules = (replace(ALGORITHMS[name], modules=frozenset(names)) for name, names in modules.items())
    return Recipe(f"modelopt {_MIXED}", tuple(rules), tuple(sorted(ignored)), kv_cache)


def _kv_cache(places: Sequence[Mapping[str, object]]) -> str:
    """What keys and values are quantised to: the words of ModelOpt, or the type and bits of
    compressed-tensors, of which 8 bits of a float are FP8; empty: nothing is said."""
    for each in places:
        for found in (each.get("kv_cache_quant_algo"), each.get("kv_cache_scheme")):
            if isinstance(found, str):
                return found.upper()
            if isinstance(found, Mapping):
                kind = f"{found.get('type')} {found.get('num_bits')}"
                return "FP8" if kind == "float 8" else kind
    return ""


def unread(
    settings: Mapping[str, object], own: Mapping[str, object] | None, where: object
) -> list[str]:
    """Sentences about settings of a quantisation that mtpkit cannot read, with what they mean for
    heads beside it.

    Args:
        settings: a `config.json`.
        own: ModelOpt's settings beside it.
        where: the file, for messages.
    """
    file = Values(settings, where)
    read_recipe(file, own)
    found = [
        f"{problem}; quantised weights are not checked: compare the heads' acceptance in the server"
        " with that on the base in bf16"
        for problem in file.problems
    ]
    quantisation = settings.get(CONFIG)
    if isinstance(quantisation, Mapping) and _transform(quantisation):
        found.append(
            f"{CONFIG}: transform_config may rotate hidden states (QuaRot, SpinQuant), and then"
            " hardly any draft of heads that were trained without it is accepted: rotate the heads'"
            " input projection alike, or take a base without rotations"
        )
    return found


def _unsupported(what: str) -> str:
    return (
        f"{CONFIG}: {what} is not supported, only fp8 e4m3, int4 without activation ordering,"
        " and NVFP4"
    )


def _compressed_tensors(file: Values, found: Mapping[str, object]) -> Recipe | None:
    """The settings of compressed-tensors: groups of modules, each with its scheme."""
    groups = found.get("config_groups")
    problems = list(_transforms(found))
    rules = []
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        rule = _group_rule(group)
        if rule is None:
            problems.append(f"config_groups.{name} {shown(group)}")
        else:
            rules.append(rule)
    kv_cache = _kv_cache([found])
    if not rules and not problems and not kv_cache:
        problems.append(f"config_groups {shown(groups)}")
    file.problems.extend(_unsupported(problem) for problem in problems)
    if problems:
        return None
    name = f"compressed-tensors {found.get('format', '')}".strip()
    return Recipe(name, tuple(rules), _texts(found.get("ignore")), kv_cache)


def _transforms(found: Mapping[str, object]) -> Iterator[str]:
    """Settings that change what weights mean, beside their quantisation."""
    sparsity = found.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        yield f"sparsity_config {shown(sparsity)}"
    if _transform(found):
        yield f"transform_config {shown(found['transform_config'])}"


def _transform(found: Mapping[str, object]) -> bool:
    """Whether settings transform weights or activations."""
    transform = found.get("transform_config")
    return isinstance(transform, Mapping) and bool(transform.get("config_groups"))


def _group_rule(group: object) -> Rule | None:
    """The rule of an entry of `config_groups`; None if it is not supported."""
    if not isinstance(group, Mapping):
        return None
    weights = group.get("weights")
    scheme = _scheme(weights)
    inputs = _inputs(group.get("input_activations"))
    if scheme is None or inputs is None:
        return None
    codes, rows, columns = scheme
    targets = _texts(group.get("targets"))
    # A target is the class of modules or an expression for their names.
    patterns = tuple(_pattern(each) for each in targets if each.startswith("re:") or "." in each)
    if len(patterns) < len(targets):
        patterns = ()
    # No GPU that runs mtpkit multiplies fp4, so that inputs stay as they are.
    inputs = NOT_QUANTIZED if codes == "nvfp4" else inputs
    return Rule(codes, rows, columns, inputs, patterns=patterns)


def _pattern(target: str) -> str:
    return target[3:] if target.startswith("re:") else re.escape(target) + "$"


def _scheme(weights: object) -> tuple[str, int | None, int | None] | None:
    """(format, rows, columns) of `weights` of a group."""
    if not isinstance(weights, Mapping) or weights.get("actorder") not in (None, "static"):
        return None
    strategy = weights.get("strategy")
    group = weights.get("group_size")
    kind = weights.get("type"), weights.get("num_bits")
    if kind == ("float", 8):
        block = weights.get("block_structure")
        if strategy == "block" and isinstance(block, list) and len(block) == 2:
            return "fp8", int(block[0]), int(block[1])
        return {"tensor": ("fp8", None, None), "channel": ("fp8", 1, None)}.get(str(strategy))
    if kind == ("float", 4) and strategy == "tensor_group" and group == 16:
        return "nvfp4", 1, 16
    if kind == ("int", 4) and strategy == "channel":
        return "int4", 1, None
    if kind == ("int", 4) and strategy == "group" and type(group) is int and group > 0:
        return "int4", 1, group
    return None


def _inputs(settings: object) -> Inputs | None:
    """How the inputs of a group are quantised; None if that is not supported."""
    if settings is None:
        return NOT_QUANTIZED
    if not isinstance(settings, Mapping) or settings.get("type") != "float":
        return None
    if settings.get("num_bits") == 4:
        return NOT_QUANTIZED
    group = settings.get("group_size")
    if not settings.get("dynamic"):
        return Inputs("static") if settings.get("strategy") == "tensor" else None
    if settings.get("strategy") == "group" and type(group) is int:
        return Inputs("group", group)
    # Servers take a scale per token where a batch would have one, so that requests do not mix.
    return Inputs("token") if settings.get("strategy") in ("token", "tensor") else None
