"""Rules about quantised weights: what servers expect of the config, of the heads' modules, and of
block sizes."""

import json
import re
from collections.abc import Iterator, Mapping

from mtpkit.checkpoint.families.serving import SERVERS, Finding, Server, Serving, Subject
from mtpkit.checkpoint.ignored import FUSED, METHODS, IgnoreList, linears, module_of
from mtpkit.checkpoint.quantized import CONFIG, SCALE, BlockFp8, read_block_fp8
from mtpkit.checkpoint.tensors import Shape
from mtpkit.checkpoint.values import Values
from mtpkit.errors import listed, shown

_WHOLE_BLOCKS: Mapping[Server, Mapping[str, tuple[str, ...]]] = {
    "vllm": {matrix: parts[:-1] for matrix, parts in FUSED.items()},
    "sglang": {matrix: parts for matrix, parts in FUSED.items() if matrix != "fused_qkv_a_proj"},
}
"""Server -> matrix of several modules -> those of its modules that must be whole blocks, even on
one rank."""


def quantisation(subject: Subject, facts: Serving) -> Iterator[Finding]:
    """A server must be able to read the config and to learn from it which modules of the heads are
    not quantised."""
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
    if config["quant_method"] == "fp8":
        yield from _fp8(subject, config)


def _heads(subject: Subject, ignored: IgnoreList) -> Iterator[Finding]:
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
    plain = ignored.built_plain(server, modules)
    own = ignored.modules(server, modules)
    told = {
        name: ignored.leaves_out(server, module)
        for name, module in own.items()
        if name not in plain
    }
    if odd := sorted(
        module for module, left_out in told.items() if left_out and module in quantized
    ):
        yield f"quantised, though {CONFIG} says that they are not: {listed(odd)}"
    if odd := sorted(plain & quantized):
        yield f"quantised, but built without quantisation; store them in bf16: {listed(odd)}"
    yield from _halves({name: ignored.answer(server, own[name]) for name in told})
    if missing := ignored.unlisted(
        server, [module for module in modules if module not in quantized]
    ):
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
        for first in (m for m in told if m.endswith(f".{parts[0]}")):
            start = first.removesuffix(parts[0])
            answers = {part: told[start + part] for part in parts if start + part in told}
            if len(set(answers.values())) > 1:
                left_out = [part for part, answer in answers.items() if answer]
                what = f"{CONFIG}: of {start}{{{','.join(answers)}}}, which are one matrix"
                yield f"{what}, only {listed(left_out)} left out"


def _fp8(subject: Subject, config: Mapping[str, object]) -> Iterator[Finding]:
    if config.get("activation_scheme") not in ("dynamic", "static"):
        scheme = config.get("activation_scheme")
        yield Finding(
            f"{CONFIG}: activation_scheme {shown(scheme)} instead of 'dynamic' or 'static'"
        )
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


def block_sizes(subject: Subject, facts: Serving) -> Iterator[Finding]:
    """Each rank's rows or columns of an fp8 matrix must be whole blocks, and so must the parts of a
    fused matrix."""
    config = subject.quantization
    if not isinstance(config, Mapping) or config.get("weight_block_size") is None:
        return
    block = read_block_fp8(Values({CONFIG: config}, subject.directory))
    if block is None:
        return
    said: dict[str, list[Server]] = {}
    for server in SERVERS:
        odd: dict[str, None] = {}
        for name in sorted(subject.quantized):
            if (shape := subject.expected[name]) and len(shape) == 2:
                odd |= dict.fromkeys(_uneven(server, subject, facts, module_of(name), shape, block))
        for text in odd:
            said.setdefault(text, []).append(server)
    yield from (Finding(f"fp8: {text}", True, tuple(servers)) for text, servers in said.items())


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
    if (split and (ranks > 1 or ".experts." in module)) or _is_joined(server, subject, module):
        shares = (
            min(ranks, subject.config.attention.num_query_groups)
            if is_one_of(facts.split_groups)
            else ranks
        )
        # A joined matrix must be whole blocks part by part, even where no rank splits it.
        shares = shares if split else 1
        if shape[0] // shares % block.rows:
            rows = f"{shape[0]} rows, {shape[0] // shares} per rank"
            yield f"{part} has {rows}, not a multiple of the block size {block.rows}"
    if is_one_of(facts.split_columns) and ranks > 1 and shape[1] // ranks % block.columns:
        columns = f"{shape[1]} columns, {shape[1] // ranks} per rank"
        yield f"{part} has {columns}, not a multiple of the block size {block.columns}"
