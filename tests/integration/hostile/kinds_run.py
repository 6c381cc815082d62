"""Training: settings, the directory of a run, and the base's hidden states on the disk."""

import io
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtpkit.training.run import MAY_CHANGE
from tests.integration.hostile import damage
from tests.integration.hostile.cases import Expect, Kind, Mutation
from tests.integration.hostile.damage import BROKEN, VALUES, Rules
from tests.integration.hostile.kinds_model import (
    MAKES,
    dcp_metadata,
    distcp,
    json_file,
    metadata_json,
    safetensors,
)
from tests.integration.hostile.world import TRAINING

RUN = {
    "resume": "train --config train0.yaml steps=3",
    "acceptance": (
        "acceptance --model run5 --data data3/text.txt --sequence-length 32 --num-sequences 1"
    ),
}
NEEDS = ("hf8", "data3", "run5", "train0.yaml")
YAML = {**VALUES, "NaN": ".nan", "inf": ".inf"}


def settings(file: str, tree: dict[str, Any], rules: Rules) -> Callable[[Path], Iterator[Mutation]]:
    """YAML: damages of a tree, and of the syntax that JSON lacks."""

    def mutations(world: Path) -> Iterator[Mutation]:
        def as_yaml(text: str) -> str:
            return (
                text.replace(": NaN", ": .nan")
                .replace(": Infinity", ": .inf")
                .replace("[NaN", "[.nan")
            )

        yield from damage.json_tree(file, tree, rules, text=as_yaml)
        text = (world / file).read_text()
        lines = text.splitlines(keepends=True)
        head = "steps: 2\n"
        other: dict[str, tuple[str, Expect]] = {
            "empty": ("", "refused"),
            "only a comment": ("# nothing\n", "refused"),
            "only a number": ("3\n", "refused"),
            "only a text": ("nothing of this kind\n", "refused"),
            "a list": ("- model: hf8\n", "refused"),
            "two documents": ("---\n" + text + "\n---\n" + text, "refused"),
            "a tab": ("data:\n\ttrain: [x]\n", "refused"),
            "an open bracket": (text + "\nmore: [", "refused"),
            "a tag of Python": (
                "model: !!python/object/apply:os.mkdir [code-was-run]\n",
                "refused",
            ),
            "a tag of a name": ("model: !!python/name:os.system\n", "refused"),
            "an unknown tag": ("model: !nothing x\n", "refused"),
            "an alias of nothing": ("model: *nothing\n", "refused"),
            "an alias of itself": ("data: &a\n  train: *a\n", "refused"),
            "laughs": (
                "a: &a [x,x,x,x,x,x,x,x,x]\n"
                + "".join(
                    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n"
                    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
                ),
                "refused",
            ),
            "an interpolation of nothing": (head + "model: ${nothing}\n", "refused"),
            "an interpolation of itself": (head + "model: ${model}\n", "refused"),
            "an interpolation that is open": (head + "model: ${model\n", "refused"),
            "an interpolation of a resolver": (
                head + "model: ${oc.env:HOSTILE_NOTHING}\n",
                "refused",
            ),
            "an unknown resolver": (head + "model: ${nothing:x}\n", "refused"),
            "a missing value": (head + "model: ???\n", "refused"),
            "a key that is a list": ("? [a, b]\n: 1\n", "refused"),
            "a key that is a number": ("1: 2\n", "refused"),
            "a key that is null": ("null: 2\n", "refused"),
            "a date": ("steps: 2026-01-01\n", "refused"),
            "deep": ("[" * damage.DEPTH, "refused"),
            "deep blocks": ("".join(" " * n + "a:\n" for n in range(3000)), "refused"),
            "a key of 100,000 letters": ("x" * 100_000 + ": 1\n", "refused"),
        }
        for name, (content, expect) in other.items():
            yield Mutation(
                name, damage.replace(file, lambda content=content: content.encode()), expect
            )
        starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
        for place in damage.spread([start + 3 for start in starts if start], 12):
            yield Mutation(
                f"cut at {place}",
                damage.replace(file, lambda place=place: text[:place].encode()),
                "either",
            )
        broken = {"in UTF-16": "either", "in UTF-32": "either"}  # YAML is allowed to be in UTF-16
        for mutation in damage.encodings(file, text):
            expect = broken.get(mutation.name, "refused")
            yield Mutation(mutation.name, mutation.apply, expect)  # type: ignore[arg-type]
        yield Mutation(
            "a mark of UTF-8",
            damage.replace(file, lambda: b"\xef\xbb\xbf" + text.encode()),
            "accepted",
        )
        yield from (m for m in damage.binaries(file) if m.name != "empty")
        yield from damage.places(file)

    return mutations


NUMBERS = {"2.7"}
SETTINGS = Rules(
    accepted={
        "data.eval": {"[]", "removed"},
        "log_interval": {"removed"},
        "optimizer": {"removed", "{}"},
        "optimizer.*": {"removed"},
        "optimizer.lr": {*NUMBERS, "as text"},
        "optimizer.warmup_steps": {"removed", "as text"},
        "heads": {"removed", "{}"},
        "heads.num_depths": {"removed"},
        "steps": {"as text"},
        "data.*": {"as text"},
        "heads.*": {"as text"},
        "log_*": {"as text"},
        "*": (),
    },
    either={
        "data.train.*": {"null"},
        "data.eval.*": {"null"},
        "data.eval": {"null", "empty text"},
        "data": {"twice"},
        "optimizer": {"null", "[]"},
        "optimizer.warmup_steps": {"removed"},
        "data.global_batch_size": {"removed"},
        "data.eval_sequences": {"removed", "10^30"},
        "data.sequence_length": {"removed", "10^30"},
        "heads": {"null", "[]"},
        "steps": {"removed"},
        "log_interval": {"10^30"},
        "output": {"*"},
        "*": {"as text"},
        "model": {"in a list"},
        "data.train": {"null", "in a list"},
        "data.*.0": {"in a list"},
    },
)


def overrides(world: Path) -> Iterator[Mutation]:
    """`key=value` on the command line, in every class of value for every key of a short run, and
    odd texts."""
    flat = {
        f"{key}.{name}": value
        for key, part in TRAINING.items()
        if isinstance(part, dict)
        for name, value in part.items()
    }
    flat |= {key: value for key, value in TRAINING.items() if not isinstance(value, dict)}
    words = {
        "null": "null",
        "true": "true",
        "-1": "-1",
        "2.7": "2.7",
        "10^30": str(10**30),
        "NaN": ".nan",
        "inf": ".inf",
        "nothing": "",
        "long text": damage.LONG,
        "[]": "[]",
        "{}": "{}",
        "deep": "[" * 60_000 + "]" * 60_000,
        "open": "[",
        "quoted": "'",
        "interpolated": "${nothing}",
        "itself": "${KEY}",
        "a tag": "!!python/name:os.system",
        "5000 digits": "1" * 5000,
        "a byte of latin-1": "a\udce9b",
    }
    numeric = {key for key, value in flat.items() if isinstance(value, (int, float))}
    for key in flat:
        for name, word in words.items():
            expect: Expect = "refused"
            if key in (
                "output",
                "optimizer.lr",
                "data.eval",
                "optimizer.warmup_steps",
                "log_interval",
            ) or name in (
                "[]",
                "10^30",
            ):
                expect = "either"
            if key in numeric and name in ("true", "2.7") and key == "optimizer.lr":
                expect = "either"
            yield Mutation(
                f"{key}={name}",
                lambda _: None,
                expect,
                (key, key.split(".")[-1], word[:20] or key),
                (f"{key}={word.replace('KEY', key)}",),
            )
    for text in (
        "",
        "=",
        "=1",
        "steps",
        "steps=1=2",
        "unheard_of=1",
        "data.unheard_of=1",
        "steps.more=1",
        "data=3",
        "data.train[0]=x",
        "data.train[9]=x",
        "data.train[x]=x",
        "data..train=x",
        ".steps=1",
        "steps.=1",
        "${steps}=1",
        "a" * 100_000 + "=1",
        "a." * 5000 + "a=1",
        "--config",
        "[=1",
        "data.train=x,y",
    ):
        lenient = text in ("steps=1=2", "data.train[0]=x", "data.train=x,y", "--config", "=1")
        expect = "either" if lenient else "refused"
        yield Mutation(
            f"override {text[:30]!r}",
            lambda _: None,
            expect,
            (text[:20] or "override", "override", "key", "x,y"),
            (text,),
        )


def run_settings(world: Path) -> Iterator[Mutation]:
    import yaml

    file = "run5/config.yaml"
    tree = yaml.safe_load((world / file).read_text())
    rules = Rules(
        either={key: {"*"} for key in (*MAY_CHANGE, "log*", "parallel")}
        | {"*": {"removed", "as text"}}
    )
    # What the file lacks is as by default: whether that is what the run was of depends on the key.
    yield from settings(file, tree, rules)(world)


def metrics(world: Path) -> Iterator[Mutation]:
    """Lines that a resumed run keeps."""
    file = "run5/metrics.jsonl"
    lines = (world / file).read_text().splitlines()
    shown = Rules(unknown="either", doubled="either", either={"*": {"*"}, "step": (), "kind": ()})
    for number, line in enumerate(lines):
        values = json.loads(line)
        if number not in (0, 1, len(lines) - 1):
            continue

        def among(text: str, number: int = number) -> str:
            return "".join(one + "\n" for one in [*lines[:number], text, *lines[number + 1 :]])

        for mutation in damage.json_tree(file, values, shown, f"line {number + 1}: ", among):
            key = mutation.name.partition(": ")[2].partition("=")[0].split(" ")[0]
            strict = key in ("step", "kind") and not mutation.name.endswith(("twice", "10^30"))
            yield Mutation(
                mutation.name, mutation.apply, "refused" if strict else "either", mutation.names
            )
        for name, text in {
            "a list": "[1]",
            "a number": "3",
            "null": "null",
            "deep": VALUES["deep"],
            "no JSON": "nothing",
            "half": line[: len(line) // 2],
        }.items():
            changed = among(text)
            yield Mutation(
                f"line {number + 1}: {name}",
                damage.replace(file, lambda changed=changed: changed.encode()),
                "refused" if name != "half" or number + 1 < len(lines) else "either",
            )
    whole = "".join(line + "\n" for line in lines)
    yield Mutation(
        "cut in the last line", damage.replace(file, lambda: whole[:-20].encode()), "accepted"
    )
    yield from damage.encodings(file, whole)
    for mutation in damage.binaries(file):
        # Without the end of a line, the content counts as a first line that was cut off.
        one_line = mutation.name in ("empty", "one byte", "zeros")
        yield replace(mutation, expect="either") if one_line else mutation
    yield from damage.places(file, "either")


def trainer_state(world: Path) -> Iterator[Mutation]:
    """State of a checkpoint besides its tensors: the step, the position in the data, the best
    checkpoint."""
    import torch

    folder = "run5/iter_0000002"
    metadata = pickle.loads((world / folder / ".metadata").read_bytes())
    key = next(index for index in metadata.storage_data if index.fqn.startswith("common_state"))
    place = metadata.storage_data[key]
    content = (world / folder / place.relative_path).read_bytes()
    state = torch.load(
        io.BytesIO(content[place.offset : place.offset + place.length]), weights_only=False
    )

    def saved(other: Any) -> Callable[[Path], object]:
        def apply(root: Path) -> None:
            import dataclasses

            buffer = io.BytesIO()
            torch.save(other, buffer)
            path = root / folder / place.relative_path
            path.write_bytes(content + buffer.getvalue())
            moved = dataclasses.replace(place, offset=len(content), length=len(buffer.getvalue()))
            changed = dataclasses.replace(
                metadata, storage_data={**metadata.storage_data, key: moved}
            )
            (root / folder / ".metadata").write_bytes(pickle.dumps(changed))

        return apply

    yield Mutation("saved anew", saved(state), "accepted")
    for label, other in {
        "null": None,
        "no list": {},
        "nothing": [],
        "a number": [3],
        "a text": ["x"],
        "empty": [{}],
    }.items():
        yield Mutation(f"state {label}", saved(other))
    tree = state[0]
    loose = ("checkpoint_version", "best")
    for path, value in damage.walk(tree):
        if not all(isinstance(part, str) for part in path):
            continue
        key_name = ".".join(map(str, path))
        for label, raw in damage.values_for(value):
            if label in BROKEN or label == "surrogate":
                continue
            expect: Expect = (
                "either"
                if path[0] in loose or (key_name == "iteration" and label == "true")
                else "refused"
            )
            yield Mutation(
                f"{key_name}={label}",
                saved([damage._with(tree, path, json.loads(raw))]),
                expect,
                (folder, *map(str, path)),
            )
        expect = "either" if path[0] in loose else "refused"
        yield Mutation(
            f"{key_name} removed",
            saved([damage._without(tree, path)]),
            expect,
            (folder, *map(str, path)),
        )


def cache_manifest(world: Path) -> Iterator[Mutation]:
    words = {"empty text", "long text"}
    rules = Rules(
        accepted={"base_name": words},
        either={
            "base_files*": {"*"},
            "base_name": {"surrogate"},
            "splits.*.name": {*words, "surrogate"},
            "splits": {"[]"},
            "splits.*.rows_per_shard": {"10^30"},
        },
    )
    yield from json_file("cache4/cache.json", rules)(world)


CACHED = {
    "train": "train --config train0.yaml output=out cache=cache4",
    "cache": "data cache --config train0.yaml cache=cache4",
}
SETTINGS_COMMANDS = {
    "train": "train --config train0.yaml output=out steps=1",
    "cache": "data cache --config train0.yaml cache=out",
}
RUN_STATE = {"resume": RUN["resume"]}
RUN_WRITES = (*MAKES, "run5")

KINDS = (
    Kind(
        "settings",
        "train0.yaml",
        ("hf8", "data3", "train0.yaml"),
        SETTINGS_COMMANDS,
        settings("train0.yaml", TRAINING, SETTINGS),
        MAKES,
    ),
    Kind(
        "overrides",
        "train0.yaml",
        ("hf8", "data3", "train0.yaml"),
        {
            "train": "train --config train0.yaml output=out steps=1",
            "cache": "data cache --config train0.yaml cache=out steps=1",
        },
        overrides,
        MAKES,
    ),
    Kind(
        "settings of a run",
        "run5/config.yaml",
        NEEDS,
        RUN,
        run_settings,
        RUN_WRITES,
        ("acceptance",),
        names=("sequence",),
    ),
    Kind(
        "metrics.jsonl",
        "run5/metrics.jsonl",
        NEEDS,
        RUN_STATE,
        metrics,
        RUN_WRITES,
    ),
    Kind(
        "trainer state", "run5/iter_0000002/.metadata", NEEDS, RUN_STATE, trainer_state, RUN_WRITES
    ),
    Kind(
        "metadata.json",
        "run5/iter_0000002/metadata.json",
        NEEDS,
        {"resume": RUN["resume"], "acceptance": RUN["acceptance"]},
        metadata_json,
        RUN_WRITES,
        ("acceptance",),  # to which its name is enough
    ),
    Kind(
        ".metadata of a run",
        "run5/iter_0000002/.metadata",
        NEEDS,
        {"resume": RUN["resume"], "acceptance": RUN["acceptance"]},
        dcp_metadata("run5/iter_0000002"),
        RUN_WRITES,
    ),
    Kind(
        "distcp of a run",
        "run5/iter_0000002/__0_0.distcp",
        NEEDS,
        RUN_STATE,
        distcp("run5/iter_0000002"),
        RUN_WRITES,
    ),
    Kind(
        "tracker of a run",
        "run5/latest_checkpointed_iteration.txt",
        NEEDS,
        RUN,
        lambda world: run_tracker(world),
        RUN_WRITES,
        names=("sequence",),
    ),
    Kind(
        "manifest of hidden states",
        "cache4/cache.json",
        ("hf8", "data3", "cache4", "train0.yaml"),
        CACHED,
        cache_manifest,
        (*MAKES, "cache4"),
    ),
    Kind(
        "hidden states",
        "cache4/train-00000-of-00001.safetensors",
        ("hf8", "data3", "cache4", "train0.yaml"),
        CACHED,
        safetensors("cache4/train-00000-of-00001.safetensors", exact=False),
        (*MAKES, "cache4"),
        ("cache",),
    ),
)


def run_tracker(world: Path) -> Iterator[Mutation]:
    from tests.integration.hostile.kinds_model import tracker_texts

    yield from tracker_texts("run5/latest_checkpointed_iteration.txt", "2", "either")
