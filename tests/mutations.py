"""JSON as somebody else may have changed it: wrong types and sizes at every key, cut off, in other
encodings."""

import json
from collections.abc import Iterator
from typing import Any

DEEP = json.loads("[" * 500 + "]" * 500)
WRONG = [
    None,
    True,
    -1,
    0,
    2.5,
    10**18,
    10**400,
    float("nan"),
    "",
    "x",
    [],
    [1],
    [None],
    {},
    {"a": 1},
    DEEP,
]
"""Values of all types and sizes that JSON has."""


def changed(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield changes and the changed values: each entry in turn missing, with a further one beside
    it, or replaced."""
    for key in (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        rest = value.copy()
        del rest[key]
        yield f"{key} missing", rest
        for wrong in WRONG:
            if repr(wrong) != repr(value[key]):
                yield (
                    f"{key} {repr(wrong)[:20]}",
                    {**value, key: wrong} if isinstance(value, dict) else [wrong],
                )
        for what, inner in changed(value[key]):
            both = value.copy()
            both[key] = inner
            yield f"{key}.{what}", both
    if isinstance(value, dict):
        yield "more", {**value, "more": 1}


def cases(whole: str) -> list[tuple[str, bytes]]:
    """Yield changes of an object's text, and the file's content then."""
    return [
        *((what, json.dumps(value).encode()) for what, value in changed(json.loads(whole))),
        *texts(whole),
    ]


def texts(whole: str) -> Iterator[tuple[str, bytes]]:
    """The text cut off, in other encodings, and what is no object."""
    for end in range(0, len(whole.rstrip()) - 1, max(1, len(whole) // 40)):
        yield f"first {end}", whole[:end].encode()
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        yield encoding, whole.encode(encoding)
    for other in (
        b"\xff\xfe",
        b"\0",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b"null",
        b"[]",
        b"5",
        b"{}",
    ):
        yield repr(other[:9]), other
