"""Rules about quantised weights: what servers expect of the config, of the heads' modules, and of
block sizes."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpkit.checkpoint.directory import MODELOPT
from mtpkit.checkpoint.families.serving import (
    OUTPUT_LAYER,
    SERVERS,
    Finding,
    Server,
    Serving,
    Subject,
)
from mtpkit.checkpoint.ignored import FUSED, METHODS, IgnoreList, linears, module_of
from mtpkit.checkpoint.matrices import Found, StoredMatrices, find_matrices
from mtpkit.checkpoint.quantized import CONFIG, SCALE, BlockFp8, read_block_fp8
from mtpkit.checkpoint.recipe import read_recipe, unread
from mtpkit.checkpoint.tensors import Shape, TensorInfo
from mtpkit.checkpoint.values import Values
from mtpkit.errors import UserError, listed, shown
from mtpkit.model.formats import Nvfp4, odd_values

_WHOLE_BLOCKS: Mapping[Server, Mapping[str, tuple[str, ...]]] = {
    "vllm": {matrix: parts[:-1] for matrix, parts in FUSED.items()},
    "sglang": {matrix: parts for matrix, parts in FUSED.items() if matrix != "fused_qkv_a_proj"},
}
"""Server -> matrix of several modules -> those of its modules that must be whole blocks, even on
one rank."""

_SCALES = (
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "input_scale",
)
"""Ends of the names of tensors that quantisers store beside an output layer."""


def quantisation(subject: Subject, facts: Serving) -> Iterator[Finding]:
    """A server must be able to read the config and to learn from it which modules of the heads are
    not quantised, and must find what it needs beside the quantised ones."""
    config = subject.quantization
    if config is None:
        if subject.quantized:
            yield Finding(
                f"quantised weights without {CONFIG} in config.json:"
                f" {listed(sorted(subject.quantized))}"
            )
        return

    if not isinstance(config, Mapping) or not isinstance(config.get("quant_method"), str):
        yield Finding(f"{CONFIG} {shown(config)} names no quant_method")
        return

    ignored = IgnoreList.of(config, facts, len(subject.config.pattern))
    # No finding is fatal here: the servers may well know a method that mtpkit does not.
    if ignored is None:
        known = listed(METHODS)
        yield Finding(
            f"quant_method {shown(config['quant_method'])}: not known, only {known}; not checked",
            False,
        )
        return

    yield from _heads(subject, ignored)
    yield from _output_layer(subject, config)
    yield from _kv_cache(subject, config)
    yield from _unread(subject, config)
    found, problem = _found_in(subject)
    if config["quant_method"] == "fp8":
        yield from _fp8(subject, config)
    elif problem:
        yield Finding(problem)
    yield from _values(subject, found)
    yield from _block_sizes(subject, facts, config, found)


def _heads(subject: Subject, ignored: IgnoreList) -> Iterator[Finding]:
    # What is wrong for several servers is said once.
    said: dict[str, list[Server]] = {}
    for server in SERVERS:
        for text in _heads_in(server, subject, ignored):
            said.setdefault(text, []).append(server)
    yield from (Finding(text, True, tuple(servers)) for text, servers in said.items())


def _heads_in(server: Server, subject: Subject, ignored: IgnoreList) -> Iterator[str]:
    """Clauses about problems with the heads' modules in one server."""
    quantized = {module_of(name) for name in subject.quantized}
    there = subject.heads & (subject.found.keys() | subject.quantized.keys())
    modules = linears({name: subject.expected[name] for name in there}, ignored.facts)

    # What the config says counts only for modules that the server may quantise.
    plain = ignored.built_plain(server, modules)
    own = ignored.modules(server, modules)
    told = {
        name: ignored.leaves_out(server, module)
        for name, module in own.items()
        if name not in plain
    }

    odd = sorted(module for module, left_out in told.items() if left_out and module in quantized)
    if odd:
        yield f"quantised, though {CONFIG} says that they are not: {listed(odd)}"
    odd = sorted(plain & quantized)
    if odd:
        yield f"quantised, but built without quantisation; store them in bf16: {listed(odd)}"
    yield from _halves({name: ignored.answer(server, own[name]) for name in told})

    unquantized = [module for module in modules if module not in quantized]
    missing = ignored.unlisted(server, unquantized)
    if missing:
        what = (
            f"modules of the heads are not quantised, but not listed in {CONFIG}'s"
            f" {ignored.key}: add"
        )
        names = dict.fromkeys(
            ignored.to_list(server, one) for one in missing if ignored.can_list(server, one)
        )
        if names:
            yield f"{what} {listed(names, most=100, width=2000)}"

        stacks = dict.fromkeys(one.stack for one in missing if not ignored.can_list(server, one))
        if stacks:
            yield (
                f"experts of the heads are not quantised, which {CONFIG}'s {ignored.key} cannot"
                f" say: {listed(stacks)}"
            )


def _halves(told: Mapping[str, bool]) -> Iterator[str]:
    """Either all or none of the modules that are built as one matrix must be left out."""
    for parts in FUSED.values():
        for first in (module for module in told if module.endswith(f".{parts[0]}")):
            start = first.removesuffix(parts[0])
            answers = {part: told[start + part] for part in parts if start + part in told}
            if len(set(answers.values())) == 1:
                continue

            left_out = [part for part, answer in answers.items() if answer]
            what = f"{CONFIG}: of {start}{{{','.join(answers)}}}, which are one matrix"
            yield f"{what}, only {listed(left_out)} left out"


def _fp8(subject: Subject, config: Mapping[str, object]) -> Iterator[Finding]:
    if config.get("activation_scheme") not in ("dynamic", "static"):
        scheme = config.get("activation_scheme")
        yield Finding(
            f"{CONFIG}: activation_scheme {shown(scheme)} instead of 'dynamic' or 'static'"
        )

    # Without blocks there is one scale per tensor or channel, which fits every size; see `_unread`.
    if config.get("weight_block_size") is None:
        return
    block = read_block_fp8(Values({CONFIG: config}, subject.directory))
    if block is None:
        yield Finding(
            f"{CONFIG} {json.dumps(config, default=str)[:200]}: no blocks of two sizes in format"
            " e4m3"
        )
        return

    if config.get("activation_scheme") == "static":
        yield Finding(f"{CONFIG}: activation_scheme 'static' is refused with weight_block_size")

    for name in sorted(subject.quantized.keys() & subject.found.keys()):
        scale = subject.found.get(name + SCALE)
        shape = block.scale_shape(subject.found[name].shape)
        if scale is None:
            yield Finding(f"{name} is fp8 without {name}{SCALE}")
        elif scale.shape != shape:
            yield Finding(f"{name}{SCALE} {list(scale.shape)} instead of {list(shape)}")


def _output_layer(subject: Subject, config: Mapping[str, object]) -> Iterator[Finding]:
    """The heads share the base's output layer, of which servers must know how it is stored."""
    name = next((each for each in subject.expected if each.endswith(OUTPUT_LAYER)), "")
    start = name.removesuffix("weight")
    parts = [start + end for end in _SCALES if start + end in subject.found]
    if not name or not parts:
        return
    told = read_recipe(Values({CONFIG: config}, subject.directory))
    if told is not None and told.ignores(module_of(name)):
        yield Finding(
            f"{listed(parts)}: {CONFIG} says that {module_of(name)} is not quantised, so that"
            " servers have no place for them; take the entry out of the list, or store it in bf16"
        )


def _kv_cache(subject: Subject, config: Mapping[str, object]) -> Iterator[Finding]:
    """Servers read how keys and values are stored in `config.json`, SGLang of mixed precision in
    ModelOpt's file, too."""
    own = subject.modelopt.get("quantization", subject.modelopt)
    found = own.get("kv_cache_quant_algo") if isinstance(own, Mapping) else None
    here = subject.hf.get(CONFIG)
    if not found or not isinstance(here, Mapping):
        return
    if here.get("kv_cache_scheme") or here.get("kv_cache_quant_algo"):
        return
    mixed = str(here.get("quant_algo")).upper() == "MIXED_PRECISION"
    deaf: tuple[Server, ...] = ("vllm",) if mixed else SERVERS
    yield Finding(
        f"kv_cache_quant_algo {shown(found)} is in {MODELOPT} alone: keys and values are kept in"
        f" the model's dtype; write kv_cache_scheme into {CONFIG}, or give the server"
        " --kv-cache-dtype",
        False,
        deaf,
    )


def _unread(subject: Subject, config: Mapping[str, object]) -> Iterator[Finding]:
    """Servers may know what mtpkit cannot read, which is then not checked."""
    # Wrong blocks are findings of their own.
    if config["quant_method"] == "fp8" and config.get("weight_block_size") is not None:
        return
    for text in unread(subject.hf, subject.modelopt or None, subject.directory):
        yield Finding(text, False)


def _found_in(subject: Subject) -> tuple[dict[str, Found], str]:
    """The quantised matrices, and what is wrong with the tensors of some, of which there are none
    then; none of AWQ and GPTQ, or if mtpkit cannot read the method."""
    config = subject.quantization
    method = str(config.get("quant_method")) if isinstance(config, Mapping) else ""
    if method.startswith(("awq", "gptq")):
        return {}, ""
    recipe = read_recipe(Values(subject.hf, subject.directory), subject.modelopt or None)
    try:
        return find_matrices(subject.found, recipe, subject.directory), ""
    except UserError as error:
        return {}, str(error).removeprefix(f"{subject.directory}: ")


def _values(subject: Subject, found: Mapping[str, Found]) -> Iterator[Finding]:
    """Scales are positive and finite, and matrices that servers join have one scale where servers
    take the largest."""
    stored = StoredMatrices(_Files(dict(subject.found), subject.read), found, torch.bfloat16)
    odd = []
    wholes: dict[str, float] = {}
    for name in stored.matrices:
        matrix = stored.quantized(name)
        odd += [f"{name}: {clause}" for clause in odd_values(matrix)]
        if isinstance(matrix.format, Nvfp4):
            wholes[name] = matrix.parts[matrix.format.whole].flatten()[0].item()
    if odd:
        yield Finding(f"scales that no quantiser writes: {listed(odd, most=20, width=1000)}")

    uneven = []
    for parts in FUSED.values():
        first = f".{parts[0]}.weight"
        for name in (each for each in wholes if each.endswith(first)):
            start = name.removesuffix(first)
            names = [f"{start}.{part}.weight" for part in parts]
            if len({wholes[each] for each in names if each in wholes}) > 1:
                uneven.append(f"{start}.{{{','.join(parts)}}}")
    if uneven:
        yield Finding(
            f"{listed(uneven)} are one matrix in servers, which take the largest scale of the whole"
            " matrices for all and so change the others",
            False,
        )


@dataclass
class _Files:
    """The tensors of a directory."""

    tensors: dict[str, TensorInfo]
    read: Callable[[str], Tensor]


def _block_sizes(
    subject: Subject, facts: Serving, config: Mapping[str, object], found: Mapping[str, Found]
) -> Iterator[Finding]:
    """Each rank's rows and columns of a quantised matrix must be whole blocks or groups, and so
    must the parts of a fused matrix."""
    said: dict[str, list[Server]] = {}
    blocks = dict(_blocks(subject, config, found))
    for server in SERVERS:
        # Layers and experts of one kind have the same clauses, of which each is said once.
        odd: dict[str, None] = {}
        for name, (kind, block) in sorted(blocks.items()):
            shape = subject.expected[name]
            if shape and len(shape) == 2:
                clauses = _uneven(server, subject, facts, module_of(name), shape, block)
                odd |= dict.fromkeys(f"{kind}: {clause}" for clause in clauses)
        for text in odd:
            said.setdefault(text, []).append(server)
    yield from (Finding(text, True, tuple(servers)) for text, servers in said.items())


def _blocks(
    subject: Subject, config: Mapping[str, object], found: Mapping[str, Found]
) -> Iterator[tuple[str, tuple[str, BlockFp8]]]:
    """Each quantised matrix with the name of its format and the rows and columns that share an
    entry."""
    if config.get("weight_block_size") is not None:
        block = read_block_fp8(Values({CONFIG: config}, subject.directory))
        if block is not None:
            yield from ((name, ("fp8", block)) for name in subject.quantized)
        return
    group = config.get("group_size")
    method = str(config.get("quant_method"))
    if method.startswith(("awq", "gptq")) and type(group) is int and group > 0:
        yield from ((name, (method, BlockFp8(1, group))) for name in subject.quantized)
        return
    for name, each in found.items():
        parts = each.format.parts().values()
        rows = max(part.rows or 1 for part in parts)
        columns = max(part.columns or 1 for part in parts)
        if name in subject.expected:
            yield name, (each.format.name, BlockFp8(rows, columns))


def _is_joined(server: Server, subject: Subject, module: str) -> bool:
    """Whether a server joins a module with others to one matrix and needs it to be whole blocks."""
    start, dot, part = module.rpartition(".")
    return any(
        part in whole
        and all(f"{start}{dot}{other}.weight" in subject.expected for other in FUSED[matrix])
        for matrix, whole in _WHOLE_BLOCKS[server].items()
    )


def _uneven(
    server: Server, subject: Subject, facts: Serving, module: str, shape: Shape, block: BlockFp8
) -> Iterator[str]:
    """Clauses about partial blocks. They give only the last part of a module's name, which all
    layers share."""

    def is_one_of(patterns: tuple[str, ...]) -> bool:
        return any(re.search(pattern, module) for pattern in patterns)

    part = module.rpartition(".")[2]
    ranks = subject.ranks
    split = is_one_of(facts.split_rows)
    # A joined matrix must be whole blocks part by part, even where no rank splits it.
    if (split and (ranks > 1 or ".experts." in module)) or _is_joined(server, subject, module):
        shares = ranks if split else 1
        if split and is_one_of(facts.split_groups):
            shares = min(ranks, subject.config.attention.num_query_groups)
        if shape[0] // shares % block.rows:
            rows = f"{shape[0]} rows, {shape[0] // shares} per rank"
            yield f"{part} has {rows}, not a multiple of the block size {block.rows}"

    if is_one_of(facts.split_columns) and ranks > 1 and shape[1] // ranks % block.columns:
        columns = f"{shape[1]} columns, {shape[1] // ranks} per rank"
        yield f"{part} has {columns}, not a multiple of the block size {block.columns}"
