"""Model directories of both layouts: configs, weights, tokenizers, and the small files beside
them."""

import json
import os
import pickle
import pickletools
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mtpkit.checkpoint.families.keys import UNSET, Fixed, Key
from mtpkit.checkpoint.families.nemotron_h import LINES
from mtpkit.config import ModelConfig, MtpConfig
from mtpkit.config.checked import fields_of, keys_of
from mtpkit.config.sections import SECTIONS
from tests.integration.hostile import damage
from tests.integration.hostile.cases import Expect, Kind, Mutation
from tests.integration.hostile.damage import BROKEN, VALUES, Rules

PROMPTS = ("prompts1.txt", "prompts1.jsonl")
NULLABLE = {"null", "removed"}
FAR = {"-1", "10^30", "inf"}
"""Numbers of the right type that a program may call impossible or not."""


def commands(model: str) -> dict[str, str]:
    """Commands that read a model directory, the fastest first."""
    return {
        "generate": f"generate --model {model} --prompts prompts1.jsonl --max-tokens 2",
        "acceptance": (
            f"acceptance --model {model} --data data3/text.txt --sequence-length 32"
            " --num-sequences 1"
        ),
        "evaluate": (
            f"speedup --model {model} --prompts prompts1.jsonl --max-tokens 2 --k 0 1 --batch-size"
            " 1 --repeats 1 --output out"
        ),
        "train": (
            f"train model={model} output=out data.train=[data3/text.txt] data.sequence_length=32 "
            "data.global_batch_size=1 heads.num_depths=2 steps=1 optimizer.warmup_steps=1"
        ),
        "regenerate": (
            f"data regenerate --model {model} --data data3/text.txt --prompt-length 8 --limit 2 "
            "--max-tokens 2 --output out.jsonl"
        ),
        "draft-vocab": (
            f"data draft-vocab --model {model} --data data3/text.txt --size 40 --output out.json"
        ),
        "roofline": f"bench roofline --model {model}",
    }


MAKES = ("out", "out.json", "out.jsonl")
HF_COMMANDS = {
    "import": "convert import hf8 out",
    **commands("hf8"),
    "verify": "convert verify hf8 meg7",
}
MEGATRON_COMMANDS = {
    "export": "convert export meg7 out",
    **commands("meg7"),
    "verify": "convert verify meg7 hf8",
}
NEEDS = (*PROMPTS, "data3")

OWN_DEFAULTS = {
    key: fields_of(part)[name].default
    for part in (ModelConfig, MtpConfig, *SECTIONS.values())
    for name, key in keys_of(part).items()
    if not fields_of(part)[name].is_required()
}
"""What keys of mtpkit.json mean that are missing."""

HF_CONFIG = Rules(
    free=("architectures*", "torch_dtype*"),
    unknown="accepted",
    defaults={
        **{
            line.key: line.default
            for line in LINES
            if isinstance(line, Key) and line.default is not UNSET
        },
        **{line.key: line.value for line in LINES if isinstance(line, Fixed)},
    },
    optional=(
        *("num_hidden_layers", "n_shared_experts", "eos_token_id", "time_step_*", "mtpkit*"),
        *("routed_scaling_factor", "norm_topk_prob", "n_group", "topk_group"),
    ),
    null_is_missing=True,
    any_fraction=True,
    accepted={"eos_token_id": {"[]"}},
    either={
        "mtpkit": {"{}", "unknown"},
        "time_step_limit*": {*FAR, "2.7", "[]", "{}", "NaN", "unknown"},
        "time_step_min*": {"*"},
        # transformers, which reads config.json for a tokenizer's class, fails on a list
        "torch_dtype": {"[]"},
    },
    aliases={"layer_norm_epsilon": "layernorm_epsilon"},
)

OWN_CONFIG = Rules(
    defaults=OWN_DEFAULTS,
    any_fraction=True,
    accepted={"eos_token_ids": {"[]"}},
    either={
        "mamba_dt_limit.*": {*FAR, "2.7"},
        "yarn_beta_*": {*FAR, "2.7"},  # fractions that may be whole
        "moe_router_normalize": {"true"},  # null, or a flag
        "family": {"empty text"},  # an export then writes the family that fits
    },
)

ORIGINAL = Rules(
    unknown="accepted",  # names that the family does not have say nothing
    accepted={
        "ways": {"removed", "{}"},
        "lacking": {"removed", "[]"},
        "ways.*": {"removed", "empty text", "text"},
        "lacking.0": {"removed", "empty text", "text"},
    },
    either={"ways.*": {"surrogate"}, "lacking.0": {"surrogate"}},
)

MEGATRON_OPTIONAL = (*OWN_DEFAULTS, "normalization", "add_bias_linear", "mtp_num_layers")
MEGATRON_READ = {
    *MEGATRON_OPTIONAL,
    *("vocab_size", "hidden_size", "hybrid_layer_pattern", "activation_func"),
}
"""Keys that say something of the model; those of mtpkit.json are named as megatron-core's."""


def megatron_rules(tree: dict[str, Any], prefix: str) -> Rules:
    """For Megatron's settings, which are mostly of its training."""
    settings = tree["config"] if prefix else tree
    free = [f"{prefix}{key}*" for key in settings if key not in MEGATRON_READ]
    free += [f"{key}*" for key in tree if key != "config"] if prefix else []
    return Rules(
        free=tuple(free),
        optional=tuple(prefix + key for key in MEGATRON_OPTIONAL),
        null_is_missing=True,
        any_fraction=True,
        either={f"{prefix}rotary_base": {*FAR, "2.7"}},  # a whole number in these files
        accepted={prefix[:-1]: {"unknown"}},
        unknown="accepted",
        aliases={"num_nextn_predict_layers": "mtp", "activation_func": "activation"},
    )


def json_file(
    file: str, rules: Rules, missing: str = "refused"
) -> Callable[[Path], Iterator[Mutation]]:
    """All damages of a JSON file."""

    def mutations(world: Path) -> Iterator[Mutation]:
        text = (world / file).read_text()
        yield from damage.json_tree(file, json.loads(text), rules)
        yield from damage.json_texts(file, text, rules.strict)
        yield from damage.binaries(file, strict=rules.strict)
        yield from damage.places(file, missing, rules.strict)  # type: ignore[arg-type]

    return mutations


def megatron_config(world: Path) -> Iterator[Mutation]:
    text = (world / "bare7/config.json").read_text()
    tree = json.loads(text)
    tree["disk_keys"] = tree["disk_keys"][:2]
    yield from damage.json_tree("bare7/config.json", tree, megatron_rules(tree, "config."))
    yield from damage.json_texts("bare7/config.json", text)
    yield from damage.places("bare7/config.json", "refused")


def common_state(world: Path) -> Iterator[Mutation]:
    """`common.pt`: the arguments of Megatron-LM in it, and the file itself."""
    import torch

    file = "args7/common.pt"
    state = torch.load(world / file, weights_only=False)
    args = vars(state["args"])
    rules = megatron_rules(args, "")

    def saved(state: Any) -> Callable[[Path], object]:
        return lambda root: torch.save(state, root / file)

    def with_args(changed: dict[str, Any]) -> Callable[[Path], object]:
        return saved({**state, "args": type(state["args"])(**changed)})

    for key, value in args.items():
        for label, raw in damage.values_for(value):
            if label in BROKEN or label == "surrogate":
                continue
            expect = rules.expect(key, label, value)
            yield Mutation(
                f"{key}={label}", with_args({**args, key: json.loads(raw)}), expect, (key,)
            )
        rest = {name: other for name, other in args.items() if name != key}
        yield Mutation(
            f"{key} removed", with_args(rest), rules.expect(key, "removed", value), (key,)
        )
    others = {
        "null": None,
        "a list": [1],
        "a number": 3,
        "a text": "x",
        "no args": {},
        "a tensor": torch.zeros(3),
    }
    for name, other in others.items():
        yield Mutation(f"only {name}", saved(other))
        if name != "no args":
            yield Mutation(f"args {name}", saved({**state, "args": other}))
    yield Mutation("a pickle that runs code", damage.replace(file, lambda: pickle.dumps(_Runs())))
    size = (world / file).stat().st_size
    yield from damage.cuts(file, [*range(0, size, max(1, size // 12)), size - 1], 14)
    yield from damage.flips(file, range(0, size, max(1, size // 12)), 12)
    yield from damage.binaries(file)
    yield from damage.places(file)


class _Runs:
    """Leaves a directory behind when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("code-was-run",)


def generation_config(world: Path) -> Iterator[Mutation]:
    rules = Rules(
        free=("do_sample*",),
        unknown="accepted",
        accepted={"eos_token_id": {*NULLABLE, "[]"}},
    )
    yield from json_file("hf8/generation_config.json", rules, "accepted")(world)


def index(world: Path) -> Iterator[Mutation]:
    file = "shards8/model.safetensors.index.json"
    text = (world / file).read_text()
    tree = json.loads(text)
    rules = Rules(free=("metadata*",), unknown="accepted", either={"metadata*": {"*"}})
    yield from json_file(file, rules)(world)
    names = list(tree["weight_map"])
    other = next(
        shard for shard in tree["weight_map"].values() if shard != tree["weight_map"][names[0]]
    )
    for label, shard in {
        "another shard": other,
        "a parent": "../" + tree["weight_map"][names[0]],
        "an absolute path": "/etc/passwd",
        "a directory": ".",
        "no safetensors": "config.json",
        "a zero in it": "model\0.safetensors",
        "itself": Path(file).name,
    }.items():
        changed = {**tree, "weight_map": {**tree["weight_map"], names[0]: shard}}
        yield Mutation(
            f"weight_map names {label}",
            damage.replace(file, lambda changed=changed: json.dumps(changed).encode()),
            names=(names[0], "shards8"),
        )


def safetensors(file: str, exact: bool = True) -> Callable[[Path], Iterator[Mutation]]:
    """Header length, header and body of a safetensors file.

    Args:
        exact: all tensors are read, and nothing makes the file anew.
    """

    def mutations(world: Path) -> Iterator[Mutation]:
        content = (world / file).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        body = content[8 + length :]
        names = [name for name in header if name != "__metadata__"]
        ends = [8 + length + header[name]["data_offsets"][1] for name in names]
        whole = len(content)
        yield from damage.cuts(
            file,
            [0, 4, 7, 8, 9, 8 + length // 2, 7 + length, 8 + length, *ends[:-1], whole - 1],
            20,
        )
        yield Mutation("more at its end", damage.replace(file, lambda: content + bytes(8)))
        for number in (0, 1, length - 1, length + 1, whole, 2**31, 2**63, 2**64 - 1):
            changed = struct.pack("<Q", number) + content[8:]
            yield Mutation(
                f"header of {number} bytes", damage.replace(file, lambda changed=changed: changed)
            )

        def headed(text: str) -> bytes:
            raw = text.encode("utf-8", "surrogatepass")
            raw += b" " * (-len(raw) % 8)
            return struct.pack("<Q", len(raw)) + raw + body

        def header_with(name: str, raw: str) -> Callable[[], bytes]:
            mark = '"@@"'
            return lambda: headed(json.dumps({**header, name: "@@"}).replace(mark, raw))

        first = names[0]
        last = names[-1]
        for name in dict.fromkeys((first, last)):
            entry = header[name]
            for label, raw in VALUES.items():
                yield Mutation(
                    f"{name}={label}", damage.replace(file, header_with(name, raw)), names=(name,)
                )
                for key in entry:
                    tree = json.dumps({**entry, key: "@"}).replace('"@"', raw)
                    yield Mutation(
                        f"{name}.{key}={label}",
                        damage.replace(file, header_with(name, tree)),
                        names=(name,),
                    )
            for key in entry:
                rest = json.dumps({other: value for other, value in entry.items() if other != key})
                yield Mutation(
                    f"{name}.{key} removed",
                    damage.replace(file, header_with(name, rest)),
                    names=(name,),
                )
            begin, end = entry["data_offsets"]
            shape = entry["shape"]
            odd = {
                "dtype I32": {"dtype": "I32"},
                "dtype U32": {"dtype": "U32"},
                "dtype F64": {"dtype": "F64"},
                "dtype BF16": {"dtype": "BF16"},
                "dtype F8_E4M3": {"dtype": "F8_E4M3"},
                "dtype Q4": {"dtype": "Q4"},
                "no shape": {"shape": []},
                "a shape of 0": {"shape": [0, *shape]},
                "a huge shape": {"shape": [2**40, 2**40]},
                "a shape of many": {"shape": [1] * 5000},
                "another shape": {"shape": [1, *shape]},
                "offsets turned": {"data_offsets": [end, begin]},
                "offsets beyond": {"data_offsets": [begin, end + 10**6]},
                "offsets overflow": {"data_offsets": [2**64 - 8, 2**64 - 1]},
                "a gap": {"data_offsets": [begin + 4, end]},
            }
            for label, changes in odd.items():
                tree = json.dumps({**entry, **changes})
                yield Mutation(
                    f"{name} of {label}",
                    damage.replace(file, header_with(name, tree)),
                    names=(name,),
                )
        without = {name: header[name] for name in header if name != last}
        yield Mutation(
            "a tensor less",
            damage.replace(file, lambda: headed(json.dumps(without))),
            names=(last,),
        )
        renamed = {("unheard_of" if name == last else name): header[name] for name in header}
        yield Mutation(
            "a tensor renamed",
            damage.replace(file, lambda: headed(json.dumps(renamed))),
            names=(last,),
        )
        many = {
            **header,
            **{
                f"more{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                for i in range(2000)
            },
        }
        more: Expect = "refused" if exact else "either"
        yield Mutation(
            "2000 tensors more",
            damage.replace(file, lambda: headed(json.dumps(many))),
            more,
            ("more",),
        )
        text = json.dumps(header)
        for place in damage.spread([i for i, sign in enumerate(text) if sign in '{}[]",:'], 12):
            yield Mutation(
                f"header cut at {place}",
                damage.replace(file, lambda place=place: headed(text[:place])),
            )
        for label in ("null", "[]", "{}", "2.7", "deep", "deep objects", "empty text"):
            yield Mutation(
                f"header only {label}",
                damage.replace(file, lambda label=label: headed(VALUES[label])),
            )
        yield Mutation(
            "header with a surrogate",
            damage.replace(file, lambda: headed(text[:-1] + ', "\ud800": 1}')),
        )
        yield Mutation(
            "header in UTF-16",
            damage.replace(file, lambda: headed(text.encode("utf-16").decode("latin-1"))),
        )
        if exact:
            for label, number in {
                "NaN": float("nan"),
                "infinity": float("inf"),
                "-infinity": float("-inf"),
            }.items():
                for name in dict.fromkeys((first, last)):
                    at = 8 + length + header[name]["data_offsets"][0]
                    changed = content[:at] + struct.pack("<f", number) + content[at + 4 :]
                    yield Mutation(
                        f"{label} in {name}",
                        damage.replace(file, lambda changed=changed: changed),
                        names=(name,),
                    )
        yield from damage.binaries(file)
        yield from damage.places(file, "refused" if exact else "accepted")

    return mutations


def tracker(world: Path) -> Iterator[Mutation]:
    yield from tracker_texts("meg7/latest_checkpointed_iteration.txt", "release", "refused")


def tracker_texts(file: str, right: str, missing: Expect) -> Iterator[Mutation]:
    """Contents of the file that names the newest iteration."""
    texts = {
        "a number that is not there": "7",
        "-1": "-1",
        "2.7": "2.7",
        "10^30": str(10**30),
        "5000 digits": "9" * 5000,
        "a huge text": "x" * 10**6,
        "other digits": "٣",
        "a raised digit": "²",
        "a path": "../meg7/release",
        "two lines": f"{right}\n{right}",
        "NaN": "NaN",
        "a zero byte": f"{right}\0",
        "an underscore": "1_0",
        "upper case": "RELEASE",
    }
    for name, text in texts.items():
        yield Mutation(name, damage.replace(file, lambda text=text: text.encode()))
    yield Mutation(
        "spaces around it", damage.replace(file, lambda: f" {right}\r\n".encode()), "accepted"
    )
    yield Mutation(
        "a mark of UTF-8",
        damage.replace(file, lambda: b"\xef\xbb\xbf" + right.encode()),
        "accepted",
    )
    yield from damage.encodings(file, right)
    yield from damage.binaries(file)
    yield from damage.places(file, missing)


def metadata_json(world: Path) -> Iterator[Mutation]:
    """Its presence marks a checkpoint; megatron-core reads it when a run is resumed."""
    file = "run5/iter_0000002/metadata.json"
    text = (world / file).read_text()
    rules = Rules(unknown="either", doubled="either", either={"*": {"*"}})
    yield from damage.json_tree(file, json.loads(text), rules)
    yield from damage.json_texts(file, text, strict=False)
    yield from damage.binaries(file, strict=False)
    yield from damage.places(file, "either", strict=False)


def dcp_metadata(directory: str) -> Callable[[Path], Iterator[Mutation]]:
    """`.metadata`: a pickle of what lies where."""
    file = f"{directory}/.metadata"

    def mutations(world: Path) -> Iterator[Mutation]:
        import dataclasses

        import torch

        content = (world / file).read_bytes()
        metadata = pickle.loads(content)
        ends = [place for _, _, place in pickletools.genops(content) if place]
        yield from damage.cuts(file, [0, 1, *ends[1:], len(content) - 1], 24)
        yield from damage.flips(file, ends, 40)
        others = {
            "null": None,
            "a list": [1],
            "an object": {},
            "a number": 3,
            "a text": "x",
            "a tensor": torch.zeros(2),
        }
        for name, other in others.items():
            yield Mutation(
                f"only {name}", damage.replace(file, lambda other=other: pickle.dumps(other))
            )
        yield Mutation(
            "a pickle that runs code", damage.replace(file, lambda: pickle.dumps(_Runs()))
        )
        yield Mutation(
            "a deep pickle",
            damage.replace(file, lambda: b"\x80\x04" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."),
        )

        def saved(**changes: Any) -> Callable[[Path], object]:
            return damage.replace(
                file, lambda: pickle.dumps(dataclasses.replace(metadata, **changes))
            )

        for field in ("state_dict_metadata", "storage_data", "planner_data"):
            for name, other in {**others, "nothing": {}}.items():
                expect = "either" if field == "planner_data" else "refused"
                yield Mutation(f"{field} {name}", saved(**{field: other}), expect, (field,))  # type: ignore[arg-type]
        tensors = {
            k: v for k, v in metadata.state_dict_metadata.items() if hasattr(v, "properties")
        }
        models = [key for key in tensors if not key.startswith("optimizer")]
        key = models[0]
        entry = tensors[key]

        def with_entry(other: Any) -> Callable[[Path], object]:
            return saved(state_dict_metadata={**metadata.state_dict_metadata, key: other})

        def with_size(size: Any) -> Callable[[Path], object]:
            return with_entry(dataclasses.replace(entry, size=size))

        for name, size in {
            "null": None,
            "a text": "x",
            "10^12": torch.Size([10**12, *entry.size[1:]]),
            "negative": torch.Size([-1, *entry.size[1:]]),
            "empty": torch.Size([]),
            "of texts": ("a", "b"),
            "of fractions": (2.7, 32.0),
            "10^30": (10**30, 32),
        }.items():
            yield Mutation(f"size {name}", with_size(size), names=(key,))
        for name, other in others.items():
            yield Mutation(f"entry {name}", with_entry(other), names=(key,))
            yield Mutation(
                f"properties {name}",
                with_entry(dataclasses.replace(entry, properties=other)),
                names=(key,),
            )
            yield Mutation(
                f"chunks {name}", with_entry(dataclasses.replace(entry, chunks=other)), names=(key,)
            )
        yield Mutation("no chunks", with_entry(dataclasses.replace(entry, chunks=[])), names=(key,))
        for dtype in (torch.int32, torch.bool, torch.complex64, None, "float32"):
            properties = dataclasses.replace(entry.properties, dtype=dtype)
            yield Mutation(
                f"dtype {dtype}",
                with_entry(dataclasses.replace(entry, properties=properties)),
                names=(key,),
            )
        for name, offsets in {"beyond": [10**6, 0], "negative": [-5, 0], "too few": []}.items():
            chunk = dataclasses.replace(entry.chunks[0], offsets=torch.Size(offsets))
            yield Mutation(
                f"offsets {name}",
                with_entry(dataclasses.replace(entry, chunks=[chunk])),
                names=(key,),
            )
        for name, sizes in {
            "10^12": [10**12, 10**3],
            "negative": [-5, 3],
            "too few": [],
            "1": [1, 1],
        }.items():
            chunk = dataclasses.replace(entry.chunks[0], sizes=torch.Size(sizes))
            enough: Expect = "either" if name == "10^12" else "refused"
            yield Mutation(
                f"sizes {name}",
                with_entry(dataclasses.replace(entry, chunks=[chunk])),
                enough,
                (key,),
            )
        place = next(index for index in metadata.storage_data if index.fqn == key)
        info = metadata.storage_data[place]

        def with_info(other: Any) -> Callable[[Path], object]:
            return saved(storage_data={**metadata.storage_data, place: other})

        for name, other in others.items():
            yield Mutation(f"place {name}", with_info(other), names=(key,))
        for field, values in {
            "relative_path": (
                "",
                "nothing",
                "../" * 3 + "etc/passwd",
                "/etc/passwd",
                ".",
                3,
                None,
                "a\0b",
                "x" * 5000,
            ),
            "offset": (-1, 1, 10**9, 10**30, 2.7, None, "0"),
            "length": (-1, 0, 1, 10**30, 2.7, None, "0"),
        }.items():
            for value in values:
                if getattr(info, field) == value:
                    continue
                changed = dataclasses.replace(info, **{field: value})
                expect = "either" if field == "length" else "refused"
                yield Mutation(f"{field} {str(value)[:20]!r}", with_info(changed), expect, (key,))  # type: ignore[arg-type]
        gone = {index: info for index, info in metadata.storage_data.items() if index != place}
        yield Mutation("a place less", saved(storage_data=gone), names=(key,))
        less = {name: entry for name, entry in metadata.state_dict_metadata.items() if name != key}
        yield Mutation("a tensor less", saved(state_dict_metadata=less), names=(key,))
        more = {**metadata.state_dict_metadata, "unheard_of": entry}
        yield Mutation("a tensor more", saved(state_dict_metadata=more), names=("unheard_of",))
        numbered = {**metadata.state_dict_metadata, 3: entry}
        yield Mutation("a tensor without a name", saved(state_dict_metadata=numbered))
        yield from damage.binaries(file)
        yield from damage.places(file)

    return mutations


def distcp(directory: str, name: str = "__0_0.distcp") -> Callable[[Path], Iterator[Mutation]]:
    """The file with the tensors."""
    file = f"{directory}/{name}"

    def mutations(world: Path) -> Iterator[Mutation]:
        metadata = pickle.loads((world / directory / ".metadata").read_bytes())
        tensors = {
            key
            for key, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "properties")
        }
        places = [
            (i.fqn in tensors, p)
            for i, p in metadata.storage_data.items()
            if p.relative_path == name
        ]
        starts = sorted(place.offset for _, place in places)
        needed = max(place.offset + place.length for of_tensor, place in places if of_tensor)
        ends = [*starts, *(start + 40 for start in starts), (world / file).stat().st_size - 1]
        yield from damage.cuts(
            file, ends, 30, lambda end: "refused" if end < needed - 200 else "either"
        )
        inside = [start + 10 * n for start in starts for n in range(8)]
        yield from damage.flips(file, inside, 30)
        yield from damage.binaries(file)
        yield from damage.places(file)

    return mutations


def tokenizer(world: Path) -> Iterator[Mutation]:
    """Read by the library tokenizers: what it forgives is its own affair."""
    file = "hf8/tokenizer.json"
    text = (world / file).read_text()
    tree = json.loads(text)
    small = {**tree, "model": {**tree["model"], "merges": tree["model"]["merges"][:2]}}
    small["model"]["vocab"] = dict(list(tree["model"]["vocab"].items())[:3])
    for number, mutation in enumerate(damage.json_tree(file, small, Rules(strict=False))):
        if number % 2 == 0 or "deep" in mutation.name:
            yield mutation
    yield from damage.json_texts(file, text, strict=False)
    yield from damage.binaries(file)
    yield from damage.places(file, "either", strict=False)


def tokenizer_config(world: Path) -> Iterator[Mutation]:
    file = "hf8/tokenizer_config.json"
    text = (world / file).read_text()
    yield from damage.json_tree(file, json.loads(text), Rules(strict=False))
    yield from damage.json_texts(file, text, strict=False)
    yield from damage.binaries(file, strict=False)
    yield from damage.places(file, "either", strict=False)


TOKENIZER_COMMANDS = {
    "inspect": "data inspect --model hf8 --data data3/rows.jsonl --sequence-length 32",
    **{name: commands("hf8")[name] for name in ("generate", "draft-vocab", "regenerate", "train")},
    "prepare": "data prepare --model hf8 --data data3/chat.jsonl --sequence-length 32 --output out",
}
EXPORT_BARE = {
    "export": "convert export bare7 out",
    "generate": "generate --model bare7 --prompts tokens1.jsonl --max-tokens 2 --json",
    "roofline": "bench roofline --model bare7",
}

KINDS = (
    Kind(
        "config.json",
        "hf8/config.json",
        ("hf8", "meg7", *NEEDS),
        HF_COMMANDS,
        json_file("hf8/config.json", HF_CONFIG),
        MAKES,
        ("draft-vocab", "roofline"),
    ),
    Kind(
        "mtpkit.json",
        "meg7/mtpkit.json",
        ("hf8", "meg7", *NEEDS),
        MEGATRON_COMMANDS,
        json_file("meg7/mtpkit.json", OWN_CONFIG, "either"),
        MAKES,
        ("draft-vocab", "roofline", "verify"),
    ),
    Kind(
        "mtpkit_original.json",
        "meg7/mtpkit_original.json",
        ("hf8", "meg7", *NEEDS),
        {"export": MEGATRON_COMMANDS["export"]},
        json_file("meg7/mtpkit_original.json", ORIGINAL, "accepted"),
        MAKES,
    ),
    Kind(
        "Megatron's config.json",
        "bare7/config.json",
        ("bare7", "tokens1.jsonl"),
        EXPORT_BARE,
        megatron_config,
        MAKES,
        ("roofline",),
    ),
    Kind(
        "common.pt",
        "args7/common.pt",
        ("args7", "tokens1.jsonl"),
        {name: text.replace("bare7", "args7") for name, text in EXPORT_BARE.items()},
        common_state,
        MAKES,
        ("roofline",),
    ),
    Kind(
        "generation_config.json",
        "hf8/generation_config.json",
        ("hf8", *NEEDS),
        {name: commands("hf8")[name] for name in ("generate", "regenerate", "evaluate")},
        generation_config,
        MAKES,
    ),
    Kind(
        "index",
        "shards8/model.safetensors.index.json",
        ("shards8", "meg7", *NEEDS),
        {
            "import": "convert import shards8 out",
            "stitch": "convert stitch shards8 meg7 out",
            **{n: commands("shards8")[n] for n in ("generate", "acceptance", "train")},
            "verify": "convert verify shards8 meg7",
        },
        index,
        MAKES,
    ),
    Kind(
        "safetensors",
        "hf8/model.safetensors",
        ("hf8", "meg7", *NEEDS),
        {
            **{n: c for n, c in HF_COMMANDS.items() if n not in ("draft-vocab", "roofline")},
            "stitch": "convert stitch hf8 meg7 out",
        },
        safetensors("hf8/model.safetensors"),
        MAKES,
    ),
    Kind(
        "tracker",
        "meg7/latest_checkpointed_iteration.txt",
        ("hf8", "meg7", *NEEDS),
        MEGATRON_COMMANDS,
        tracker,
        MAKES,
    ),
    Kind(
        ".metadata",
        "meg7/release/.metadata",
        ("hf8", "meg7", *NEEDS),
        {n: c for n, c in MEGATRON_COMMANDS.items() if n not in ("draft-vocab", "roofline")},
        dcp_metadata("meg7/release"),
        MAKES,
    ),
    Kind(
        "distcp",
        "meg7/release/__0_0.distcp",
        ("hf8", "meg7", *NEEDS),
        {
            n: c
            for n, c in MEGATRON_COMMANDS.items()
            if n not in ("draft-vocab", "roofline", "verify")
        },
        distcp("meg7/release"),
        MAKES,
    ),
    Kind(
        "tokenizer.json",
        "hf8/tokenizer.json",
        ("hf8", *NEEDS),
        TOKENIZER_COMMANDS,
        tokenizer,
        MAKES,
    ),
    Kind(
        "tokenizer_config.json",
        "hf8/tokenizer_config.json",
        ("hf8", *NEEDS),
        TOKENIZER_COMMANDS,
        tokenizer_config,
        MAKES,
    ),
)
