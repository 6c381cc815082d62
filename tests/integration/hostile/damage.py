"""Damages by class: type, size, depth, encoding, missing, extra, and the place where a file lies.

Each function yields `Mutation`s of one file. They name what they do, so that a case can be run
again by its name, and draw no random numbers but from seeds that are part of the name.
"""

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.integration.hostile.cases import Expect, Mutation

DEPTH = 100_000
LONG = "x" * 10_000
VALUES = {
    "null": "null",
    "true": "true",
    "-1": "-1",
    "2.7": "2.7",
    "10^30": str(10**30),
    "NaN": "NaN",
    "inf": "Infinity",
    "empty text": '""',
    "long text": json.dumps(LONG),
    "surrogate": '"\\ud800"',
    "[]": "[]",
    "{}": "{}",
    "deep": "[" * DEPTH + "]" * DEPTH,
    "deep objects": '{"a":' * DEPTH + "1" + "}" * DEPTH,
    "5000 digits": "1" * 5000,
}
"""What is put in the place of every value, as JSON."""
BROKEN = {"deep", "deep objects", "5000 digits"}
"""Those that no reader of mtpkit takes, whatever the key."""
FRACTIONS = {"-1", "2.7", "10^30", "inf"}
"""Numbers in the place of a fraction: which of them are in its range is the reader's to say."""
_MARK = '"@@the place@@"'

Path_ = tuple[str | int, ...]
"""Keys and indices from the root of a tree to a value."""


@dataclass(frozen=True)
class Rules:
    """Which damages leave a valid file; all others must be refused. Keys are dotted patterns, as of
    fnmatch.

    Fractions, and keys with defaults, follow from what is there: only keys with an outcome of their
    own are named.
    """

    free: tuple[str, ...] = ()
    """Keys that mtpkit does not look at: any value is good, and they may be missing."""
    accepted: Mapping[str, Iterable[str]] = field(default_factory=dict)
    """Key -> the damages that leave a value with which the command succeeds."""
    either: Mapping[str, Iterable[str]] = field(default_factory=dict)
    """Key -> the damages that a reasonable program may refuse or take; `*` for all of them."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Keys, no patterns, that may be missing, and what they mean then. Where that is the value that
    was there, the file means the same; otherwise the rest of it may fit or not."""
    optional: tuple[str, ...] = ()
    """Keys that may be missing where more than they depends on it."""
    null_is_missing: bool = False
    any_fraction: bool = False
    """Any number may stand for a fraction, as far as these rules go."""
    unknown: Expect = "refused"
    """What a key is that nobody knows, at the root; inside of others it is the damage `unknown` of
    these."""
    doubled: Expect = "refused"
    """What a key is that is there twice, with two values."""
    strict: bool = True
    """False: the file is read by a library, which may forgive or refuse anything."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Key -> what errors may call it instead."""

    def expect(self, key: str, label: str, value: object = None) -> Expect:
        """Required outcome for damage at a key that has this value."""
        if not self.strict:
            return "either"
        if label in BROKEN:
            return "refused"
        if _among(self.either, key, label):
            return "either"
        if _fits(self.free, key) or _among(self.accepted, key, label):
            return "accepted"
        if label == "removed" or (label == "null" and self.null_is_missing):
            return self._expect_missing(key, value)
        is_default = label == "null" and key in self.defaults and self.defaults[key] is None
        is_number = self.any_fraction and isinstance(value, float) and label in FRACTIONS
        is_flag = isinstance(value, bool) and label == "true"  # the other value, which may fit
        return "either" if is_default or is_number or is_flag else "refused"

    def _expect_missing(self, key: str, value: object) -> Expect:
        if key in self.defaults:
            return "accepted" if self.defaults[key] == value else "either"
        return "either" if _fits(self.optional, key) else "refused"


def _fits(patterns: Iterable[str], key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _among(table: Mapping[str, Iterable[str]], key: str, label: str) -> bool:
    return any(
        fnmatchcase(key, pattern) and ("*" in labels or label in labels)
        for pattern, labels in table.items()
    )


def replace(file: str, content: Callable[[], bytes]) -> Callable[[Path], object]:
    """Damage that writes other bytes into the file."""
    return lambda root: (root / file).write_bytes(content())


def json_tree(
    file: str, tree: Any, rules: Rules, prefix: str = "", text: Callable[[str], str] = str
) -> Iterator[Mutation]:
    """Every value of a JSON tree replaced, every key removed and doubled, and an unknown one added
    to every object.

    Args:
        prefix: of the mutations' names.
        text: what the file holds where `tree` is only a part of it.
    """

    def damaged(path: Path_, raw: str) -> Callable[[], bytes]:
        return lambda: text(
            json.dumps(_with(tree, path, json.loads(_MARK))).replace(_MARK, raw)
        ).encode()

    for path, value in walk(tree):
        key = ".".join(map(str, path))
        names = (_last_text(path), *(rules.aliases.get(str(part), str(part)) for part in path))
        for label, raw in values_for(value):
            yield Mutation(
                f"{prefix}{key}={label}",
                replace(file, damaged(path, raw)),
                rules.expect(key, label, value),
                names,
            )
        if isinstance(path[-1], str):
            without = json.dumps(_without(tree, path))
            yield Mutation(
                f"{prefix}{key} removed",
                replace(file, lambda without=without: text(without).encode()),
                rules.expect(key, "removed", value),
                names,
            )
            twice = f"{json.dumps(value)}, {json.dumps(path[-1])}: "
            for label, second in (("twice", json.dumps(value)), ("twice, the second null", "null")):
                yield Mutation(
                    f"{prefix}{key} {label}",
                    replace(file, damaged(path, twice + second)),
                    "either" if not rules.strict or label == "twice" else rules.doubled,
                    names,
                )
    for path, value in [((), tree), *walk(tree)]:
        if isinstance(value, dict):
            key = ".".join(map(str, path))
            more = {**value, "unheard_of": 1}
            changed = _with(tree, path, more) if path else more
            expect = rules.expect(key, "unknown") if path else rules.unknown
            yield Mutation(
                f"{prefix}{key or 'root'} with an unknown key",
                replace(file, lambda changed=changed: text(json.dumps(changed)).encode()),
                "either" if not rules.strict else expect,
                ("unheard_of", *map(str, path)),
            )


def walk(tree: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """(path, value) of everything in a tree but its root; of long lists the first and the last
    entry."""
    entries: Iterable[tuple[str | int, Any]] = ()
    if isinstance(tree, dict):
        entries = tree.items()
    elif isinstance(tree, list):
        entries = [(index, tree[index]) for index in dict.fromkeys((0, len(tree) - 1)) if tree]
    for key, value in entries:
        yield (*path, key), value
        yield from walk(value, (*path, key))


def values_for(value: Any) -> Iterator[tuple[str, str]]:
    """(label, JSON) of what takes the place of a value: all of `VALUES` that are not it, and itself
    in a wrong type."""
    for label, raw in VALUES.items():
        if raw != json.dumps(value):
            yield label, raw
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield "as text", json.dumps(str(value))
    if isinstance(value, (str, bool)):
        yield "in a list", json.dumps([value])


def _last_text(path: Path_) -> str:
    return (
        next(str(part) for part in reversed(path) if isinstance(part, str))
        if any(isinstance(part, str) for part in path)
        else str(path[-1])
    )


def _with(tree: Any, path: Path_, value: Any) -> Any:
    changed = copy.deepcopy(tree)
    place = changed
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return changed


def _without(tree: Any, path: Path_) -> Any:
    changed = copy.deepcopy(tree)
    place = changed
    for part in path[:-1]:
        place = place[part]
    del place[path[-1]]
    return changed


def json_texts(file: str, text: str, strict: bool = True) -> Iterator[Mutation]:
    """Whole JSON files: cut at tokens, in other encodings, with more or other things in them."""
    value = json.loads(text)
    tokens = [
        match.start()
        for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+', text)
    ]
    for place in spread(tokens, 24):
        yield Mutation(
            f"cut at {place}",
            replace(file, lambda place=place: text[:place].encode()),
            _refused(strict),
        )
    whole = {
        "a list around it": f"[{text}]",
        "a comma at the end": f"{text},",
        "two of it": f"{text}\n{text}",
        "a comment": f"// a comment\n{text}",
        **{
            f"only {label}": VALUES[label]
            for label in ("null", "true", "2.7", "empty text", "[]", "deep", "deep objects")
        },
        "only words": "nothing of this kind\n",
        "only digits": "1" * 100_000,
    }
    for name, other in whole.items():
        yield Mutation(name, replace(file, lambda other=other: other.encode()), _refused(strict))
    yield Mutation(
        "spaces around it", replace(file, lambda: f"\n \t{text}\n\n".encode()), "accepted"
    )
    yield Mutation(
        "other spaces in it",
        replace(file, lambda: json.dumps(value, indent=7).encode()),
        "accepted",
    )
    yield Mutation(
        "a mark of UTF-8",
        replace(file, lambda: b"\xef\xbb\xbf" + text.encode()),
        "accepted" if strict else "either",
    )
    yield from encodings(file, text, strict)


def _refused(strict: bool) -> Expect:
    return "refused" if strict else "either"


def encodings(file: str, text: str, strict: bool = True) -> Iterator[Mutation]:
    """A text in encodings that are not UTF-8, and with bytes that no text has."""
    half = len(text.encode()) // 2
    broken = {
        "in UTF-16": lambda: text.encode("utf-16"),
        "in UTF-32": lambda: text.encode("utf-32"),
        "a byte of latin-1 in it": lambda: text.encode()[:half] + b"\xe9" + text.encode()[half:],
        "a cut off character": lambda: text.encode() + "€".encode()[:2],
        "an encoded surrogate": lambda: text.encode() + b"\xed\xa0\x80",
        "compressed": lambda: b"\x1f\x8b\x08\x00" + random.Random(0).randbytes(200),
        "random bytes": lambda: random.Random(1).randbytes(3000),
    }
    for name, content in broken.items():
        yield Mutation(name, replace(file, content), _refused(strict))


def binaries(file: str, name: str = "", strict: bool = True) -> Iterator[Mutation]:
    """A file that is nothing of what it should be."""
    contents = {
        "empty": lambda: b"",
        "one byte": lambda: b"\0",
        "zeros": lambda: bytes(4096),
        "a text": lambda: b"nothing of this kind\n" * 20,
        "random": lambda: random.Random(2).randbytes(5000),
    }
    for label, content in contents.items():
        yield Mutation(f"{name}{label}", replace(file, content), _refused(strict))


def places(file: str, missing: Expect = "refused", strict: bool = True) -> Iterator[Mutation]:
    """Something else than a file where one belongs.

    Args:
        missing: what is owed where nothing is there, not even a broken link.
    """

    def instead(put: Callable[[Path], object]) -> Callable[[Path], object]:
        def apply(root: Path) -> None:
            path = root / file
            path.unlink(missing_ok=True)
            put(path)

        return apply

    others = {
        "a directory": lambda path: path.mkdir(),
        "a directory with files": lambda path: shutil.copytree(path.parent, path, symlinks=True),
        "a pipe": lambda path: os.mkfifo(path),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a link to nothing": lambda path: path.symlink_to("nothing"),
    }
    yield Mutation("missing", instead(lambda path: None), missing)
    for name, put in others.items():
        yield Mutation(name, instead(put), _refused(strict))


def cuts(
    file: str, ends: Sequence[int], most: int, expect: Callable[[int], Expect] = lambda _: "refused"
) -> Iterator[Mutation]:
    """A binary file cut off at boundaries of what is in it."""
    for end in spread(sorted(set(ends)), most):
        yield Mutation(
            f"cut at {end}",
            lambda root, end=end: os.truncate(root / file, end),
            expect(end),
        )


def flips(
    file: str, places_: Sequence[int], most: int, expect: Expect = "either"
) -> Iterator[Mutation]:
    """Single bytes changed; most formats have no checksum, so that some of these stay valid
    files."""
    for place in spread(list(places_), most):
        for other in (0x00, 0xFF, 0x80):

            def apply(root: Path, place: int = place, other: int = other) -> None:
                content = bytearray((root / file).read_bytes())
                content[place] ^= other or 0x01
                (root / file).write_bytes(content)

            yield Mutation(f"byte {place} xor {other or 1:#x}", apply, expect)


def spread(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many, evenly spread, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[index * (len(values) - 1) // (most - 1)] for index in range(most)]
