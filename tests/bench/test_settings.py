"""Settings that benchmarks and engines share refuse what an engine's own arguments refuse."""

import math
from typing import Any

from mtpkit.bench import settings
from mtpkit.config.checked import WrongValues, keys_of
from mtpkit.engine import EngineOptions
from mtpkit.engine.requests.options import EngineConfig
from tests.shared import each

CLASSES = [
    one
    for one in vars(settings).values()
    if isinstance(one, type) and one.__module__ == settings.__name__
]
NEEDED = {EngineOptions: {"model": "x"}, EngineConfig: {"max_model_len": 64}}
VALUES = [
    *(
        None,
        True,
        "",
        "x",
        "auto",
        "3",
        b"x",
        [],
        {},
        [3, 0],
        "[3, 0]",
        [[1]],
        (0.5,),
        {5},
        object(),
    ),
    *(
        -(2**63) - 1,
        -(2**31),
        -5,
        -1,
        0,
        1,
        2,
        63,
        64,
        1000,
        1001,
        2**31 - 1,
        2**31,
        2**40,
        2**63,
        2**70,
    ),
    *(-0.5, 0.0, 1e-9, 0.5, 1.0, 1.5, 3.0, math.inf, -math.inf, math.nan),
]
OWN = {("DecodeConfig", "draft_vocab")}
"""Fields of another meaning: a whole number, or the first so many tokens."""


def shared() -> list[tuple[Any, str]]:
    """Each class with each field whose name an engine's argument has."""
    return [
        (cls, name)
        for cls in [*CLASSES, EngineConfig]
        for name in keys_of(cls)
        if name in keys_of(EngineOptions)
    ]


def refuses(cls: Any, name: str, value: object) -> bool:
    try:
        cls(**NEEDED.get(cls, {}) | {name: value})
    except WrongValues as error:
        return any(clause.startswith(name) for clause in error.clauses)
    return False


def test_all_classes_are_found():
    assert {"SpeedupConfig", "PrefillConfig", "TrainBenchConfig"} <= {
        cls.__name__ for cls in CLASSES
    }
    assert len(shared()) > 50


@each(("cls", "name"), shared())
def test_what_an_engine_refuses_is_refused(cls, name):
    refused = [value for value in VALUES if refuses(EngineOptions, name, value)]
    taken = [value for value in refused if not refuses(cls, name, value)]
    assert refused and (taken == [] or (cls.__name__, name) in OWN)
