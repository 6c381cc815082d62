"""Find problems that vLLM and SGLang would have with a Hugging Face directory, without running
them.

The rules here hold for every family; `Family.serving` states the facts that they need, and further
rules of the family.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from mtpkit.checkpoint.directory import HFDirectory, open_directory
from mtpkit.checkpoint.families import Family
from mtpkit.checkpoint.families.serving import SERVERS, Finding, Need, Rule, Server, Subject
from mtpkit.checkpoint.lint_quantized import quantisation
from mtpkit.checkpoint.quantized import FP8, find_quantized
from mtpkit.checkpoint.tensors import FLOATS, is_finite
from mtpkit.config import MtpConfig
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import is_there
from mtpkit.model.kinds import kinds_in, uneven_sizes

_WIDTH = 2000
"""Most characters of names in a finding, which is a report and may be longer than an error line."""
_NORM_SHIFT = 0.5
"""If the mean of norms differs from the usual one by more, an offset of 1 may be missing or have
been added twice."""
_GROUPS = "mamba_num_groups"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")


def lint(directory: Path | str, server: Server | None = None, ranks: int = 1) -> list[Finding]:
    """List the problems that a server would have with a Hugging Face directory, fatal ones first.

    Args:
        server: the server to check for; None: all known servers.
        ranks: tensor-parallel ranks of the server.

    Raises:
        UserError: the directory has another layout, its files are damaged, or its config cannot be
            represented.
    """
    opened = open_directory(directory, any_quantization=True)
    if not isinstance(opened, HFDirectory):
        raise UserError(
            f"{opened.path} has the Megatron layout, which no server reads; use `export` to"
            " convert it"
        )
    config = opened.config
    reader = opened.reader
    expected = opened.table.hf_shapes(opened.stored)
    subject = Subject(
        directory=opened.path,
        hf={key: value for key, value in opened.settings.items() if value is not None},
        quantization=opened.quantization,
        modelopt=opened.modelopt or {},
        config=config,
        found=reader.tensors,
        expected=expected,
        heads=frozenset(opened.table.mtp_names(opened.stored)),
        quantized=find_quantized(reader.tensors, expected),
        carried=frozenset(reader.carried.tensors),
        read=reader.read,
        ranks=ranks,
    )
    # All rules run for all servers: which server a finding is about is known only then.
    wanted = {server} if server else {*SERVERS}
    found = [
        finding
        for rule in _rules(opened.family)
        for finding in rule(subject)
        if wanted & {*finding.servers}
    ]
    return sorted(found, key=lambda finding: not finding.fatal)


def _rules(family: Family) -> list[Rule]:
    """All rules for a family's directories."""
    facts = family.serving

    def architecture(subject: Subject) -> Iterator[Finding]:
        names = subject.hf.get("architectures")
        if not isinstance(names, list) or names[:1] != [family.architecture]:
            yield Finding(
                f"architectures {shown(names)}: servers choose the model by it; write"
                f" {family.architecture}"
            )

    def depth(subject: Subject) -> Iterator[Finding]:
        stated = subject.setting(facts.count_key)
        count = facts.count_default if stated is None else stated
        stored = subject.config.mtp.num_layers
        pattern = subject.config.mtp.pattern
        if not stored:
            assumed = f"{facts.count_key} is absent, which counts as {shown(count)}"
            given = assumed if stated is None else f"{facts.count_key} is {shown(count)}"
            lack = (
                "there are no heads to draft with"
                if count == 0
                else "no tensor of a head is stored"
            )
            yield Finding(f"{given}: {lack}; train heads, or stitch some into the directory")
            return
        if count != stored:
            yield Finding(
                f"{facts.count_key} is {shown(count)}, but {stored} MTP layers are stored"
            )
        if stored > 1:
            deaf = tuple(server for server in SERVERS if server not in facts.depths)
            limits: Mapping[Server, str] = {
                "vllm": "vLLM runs only the first",
                "sglang": "SGLang takes no more than 1",
            }
            yield Finding(
                f"{stored} MTP layers are stored: {', '.join(limits[server] for server in deaf)};"
                " export the one layer of a repeated head, not its depths",
                servers=deaf,
            )
        if not facts.builds(pattern):
            allowed = facts.head_patterns or [f"layers {', '.join(facts.head_letters)}"]
            yield Finding(
                f"heads of layers {pattern!r}: servers build {listed(allowed)} only; train heads"
                " with a heads.pattern of these"
            )

    def tied(subject: Subject) -> Iterator[Finding]:
        deaf = tuple(server for server in SERVERS if server not in facts.ties)
        if subject.config.tie_word_embeddings and deaf:
            text = (
                "embeddings are tied, but the server ignores that: store lm_head, set"
                " tie_word_embeddings=false"
            )
            yield Finding(text, True, deaf)

    def needs(subject: Subject) -> Iterator[Finding]:
        kinds = {kind.name for kind in kinds_in(subject.config.letters)}
        for need in facts.needs:
            if need.kind and need.kind not in kinds:
                continue
            if finding := _unmet(need, subject.setting(need.key)):
                yield finding

    def fed(subject: Subject) -> Iterator[Finding]:
        return _fed(subject, family)

    def fp32(subject: Subject) -> Iterator[Finding]:
        rounded = [
            name
            for name, info in subject.found.items()
            if info.dtype != torch.float32
            and any(re.search(pattern, name) for pattern in facts.fp32)
        ]
        if rounded:
            yield Finding(f"not stored in fp32, and so rounded: {listed(rounded, most=4)}", False)

    def norms(subject: Subject) -> Iterator[Finding]:
        return _norms(subject, facts.norm_means)

    def quantized(subject: Subject) -> Iterator[Finding]:
        return quantisation(subject, facts)

    def sizes(subject: Subject) -> Iterator[Finding]:
        return _sizes(subject, facts.split_input)

    shared = [
        architecture,
        _names,
        depth,
        sizes,
        tied,
        needs,
        fed,
        quantized,
        _dtype,
        fp32,
        norms,
        _files,
    ]
    return [*shared, *facts.rules]


def _fed(subject: Subject, family: Family) -> Iterator[Finding]:
    """Heads whose inputs differ from what a server feeds them.

    If the directory says how its heads were trained, every difference is reported that their number
    of depths lets show. For published heads that is not known: differences are reported if the file
    states the input, and always for the hidden state of the base, which costs the most.
    """
    usual = MtpConfig().rules
    feeds = family.serving.feeds
    heads = subject.config.mtp
    for key, value in heads.rules.items() if heads.num_layers else ():
        deaf = tuple(
            server for server in SERVERS if feeds.get(server, {}).get(key, usual[key]) != value
        )
        shows = key != "mtp_reads_of_depth" or heads.num_depths > 1
        told = (
            (heads.depths_known and shows)
            or value != family.usual_rules[key]
            or key == "mtp_reads_of_base"
        )
        # A window is said once, with its sinks.
        if deaf and told and key != "mtp_attention_sinks":
            trained = f"the heads were trained with {key} {json.dumps(value)}"
            served = "see the whole context" if "window" in key else "are fed otherwise"
            yield Finding(f"{trained}, but {served}: fewer drafts are accepted", False, deaf)


def _unmet(need: Need, found: object) -> Finding | None:
    if found is None:
        return Finding(f"config.json lacks {need.key}: {need.why}", need.fatal, need.servers)
    if need.value is not None and found != need.value:
        return Finding(
            f"{need.key} {shown(found)} instead of {need.value!r}: {need.why}",
            need.fatal,
            need.servers,
        )
    return None


def _names(subject: Subject) -> Iterator[Finding]:
    """A server skips a tensor with a wrong name or shape, fails on it, or leaves its own weight
    uninitialised."""
    found = subject.found
    expected = subject.expected
    quantized = subject.quantized
    both = found.keys() & expected.keys()
    for title, names in (
        ("missing", expected.keys() - found.keys() - quantized.keys()),
        ("unexpected", found.keys() - expected.keys() - set().union(*quantized.values())),
        (
            "not floating-point numbers",
            {n for n in both - quantized.keys() if found[n].dtype not in FLOATS},
        ),
    ):
        for whose, part in (("of the heads", names & subject.heads), ("", names - subject.heads)):
            if part:
                yield Finding(
                    f"{len(part)} tensors {whose} {title}: ".replace("  ", " ") + _listed(part)
                )
    # several numbers per element
    packed = {name for name in both & quantized.keys() if found[name].dtype != FP8}
    odd = sorted(
        name for name in both - packed if tuple(found[name].shape) != tuple(expected[name])
    )
    if odd:
        shapes = [
            f"{name} {list(found[name].shape)} instead of {list(expected[name])}" for name in odd
        ]
        yield Finding(f"{len(odd)} tensors of another shape: {_listed(shapes)}")


def _sizes(subject: Subject, split_input: tuple[Server, ...]) -> Iterator[Finding]:
    """Sizes that the number of tensor-parallel ranks must divide. A single group of Mamba2 is
    copied to all ranks, in SGLang unless the model is quantised."""
    ranks = subject.ranks
    config = subject.config
    for size in uneven_sizes(config, ranks):
        if size.key == _GROUPS and size.size == 1:
            if subject.quantization is not None:
                text = (
                    f"{size.key} 1: a quantised model cannot be split over tensor-parallel size"
                    f" {ranks}"
                )
                yield Finding(text, servers=("sglang",))
            continue
        share = (
            "does not divide it, nor the other way round" if size.shared else "does not divide it"
        )
        yield Finding(f"{size.key} {size.size}: tensor-parallel size {ranks} {share}")
    if config.hidden_size % ranks and config.mtp.num_layers and split_input:
        text = f"hidden_size {config.hidden_size}: tensor-parallel size {ranks} does not divide it"
        yield Finding(text, servers=split_input)


def _dtype(subject: Subject) -> Iterator[Finding]:
    """Servers run in the dtype that the config names."""
    counts: Counter[torch.dtype] = Counter()
    for name in subject.found.keys() & subject.expected.keys():
        counts[subject.found[name].dtype] += subject.found[name].nbytes
    if not counts:
        return
    most = str(counts.most_common(1)[0][0]).removeprefix("torch.")
    keys = ("dtype", "torch_dtype", "text_config.dtype", "text_config.torch_dtype")
    stated = next((subject.setting(key) for key in keys if subject.setting(key) is not None), None)
    # A server that chooses may take fp16, in which large values of bf16 are infinite.
    if stated is None:
        yield Finding("config.json names no dtype: servers choose one", False)
    elif stated != most and not most.startswith("float8"):
        yield Finding(f"dtype {shown(stated)}, but most weights are {most}", False)


def _norms(subject: Subject, means: tuple[tuple[str, float], ...]) -> Iterator[Finding]:
    """Norms whose mean is far from the usual one may be stored with a different offset than servers
    expect."""
    groups: dict[tuple[str, str], list[float]] = {}
    endless = []
    for name in sorted(subject.found.keys() & subject.expected.keys()):
        pattern = next((pattern for pattern, _ in means if re.search(pattern, name)), None)
        if (
            pattern is None
            or len(subject.found[name].shape) != 1
            or subject.found[name].dtype not in FLOATS
        ):
            continue
        whose = "heads" if name in subject.heads else "base"
        tensor = subject.read(name)
        if is_finite(tensor):
            groups.setdefault((pattern, whose), []).append(tensor.float().mean().item())
        else:
            endless.append(name)
    if endless:
        yield Finding(f"NaN or infinity in {_listed(endless)}")
    for (pattern, whose), values in groups.items():
        usual = dict(means)[pattern]
        # The median: a few norms of a trained model may be far from the usual mean.
        middle = sorted(values)[len(values) // 2]
        if abs(middle - usual) > _NORM_SHIFT:
            what = f"norms of the {whose} matching {pattern!r}: median mean {middle:.2f}"
            yield Finding(f"{what}, usually about {usual:g}; an offset of 1 may be wrong", False)


def _files(subject: Subject) -> Iterator[Finding]:
    """Files beside the weights: tokenizer and code."""
    directory = subject.directory
    if not any(is_there(directory / name) for name in _TOKENIZERS):
        yield Finding(f"no tokenizer; looked for {listed(_TOKENIZERS)}", False)
    code = subject.hf.get("auto_map")
    if isinstance(code, Mapping):
        names = [
            name
            for value in code.values()
            for name in (value if isinstance(value, list) else [value])
        ]
        files = {
            f"{str(name).partition('.')[0]}.py" for name in names if name and "--" not in str(name)
        }
        if missing := sorted(name for name in files if not is_there(directory / name)):
            yield Finding(f"auto_map names code that is not there: {listed(missing)}")


def _listed(names: object) -> str:
    assert isinstance(names, set | frozenset | list)
    return listed(sorted(names), most=100, width=_WIDTH)
