"""Options are declared once, and what resolved settings share with an engine's options refuses what
those refuse."""

import inspect
import math
import typing
from collections import defaultdict
from importlib import import_module
from typing import Any

import pytest
import typer

from mtpkit.bench.settings import DecodeConfig, SpeedupConfig
from mtpkit.cli.main import COMMANDS
from mtpkit.cli.options import Fields
from mtpkit.config.checked import WrongValues, fields_of, keys_of
from mtpkit.config.parts import options_of
from mtpkit.engine import EngineOptions, LLMOptions
from mtpkit.engine.requests.config import EngineConfig
from tests.shared import each

SEVERAL = {
    "num_speculative_tokens": "an engine has one K, a benchmark several, each its usual ones",
    "batch_size": "a speedup is sorted by it; the workload prefill has one",
    "acceptance": "measured rates have another meaning than given ones, and may be left out",
    "prompt_length": "of random prompts, and of the workload prefill",
    "max_tokens": "random prompts need two, to have a step",
    "dtype": "a roofline has no device that could decide, and training keeps fp32 weights",
    "seed": "of requests, of an engine's requests without one, of random prompts, of lengths",
    "repeats": "each benchmark makes something else of them",
    "trace": "each benchmark lacks something else without it",
    "tensor_parallel_size": "training splits sequences, too",
    "pipeline_parallel_size": "training runs the stages otherwise",
}
"""Options that several classes declare, and why."""

VALUES = [
    *(None, True, "", "x", "auto", "3", b"x", [], {}, [3, 0], "[3, 0]", [[1]], (0.5,), {5}),
    *(object(), -(2**63) - 1, -(2**31), -5, -1, 0, 1, 2, 63, 64, 1000, 1001, 2**31 - 1, 2**31),
    *(2**40, 2**63, 2**70, -0.5, 0.0, 1e-9, 0.5, 1.0, 1.5, 3.0, math.inf, -math.inf, math.nan),
]


def declared() -> dict[str, set[tuple[str | None, str]]]:
    """The texts of each option, with the types, over the fields of all commands. A field that is
    shared, inherited or in an object inside has the text of where it is declared."""
    found = defaultdict(set)

    def add(cls: Any, fields: Fields) -> None:
        for name, option in fields.options(cls).items():
            info = fields_of(cls)[name]
            inner = fields.inner(cls, name)
            if inner is None:
                found[option].add((info.description, str(info.annotation)))
            else:
                add(info.annotation, inner)

    for command in COMMANDS:
        group: Any = typer.main.get_command(import_module(f"mtpkit.cli.{command}").app)
        for one in getattr(group, "commands", {"": group}).values():
            written = inspect.unwrap(one.callback)
            for hint in typing.get_type_hints(written, include_extras=True).values():
                for mark in getattr(hint, "__metadata__", ()):
                    if isinstance(mark, Fields):
                        add(hint.__origin__, mark)
    return found


def test_an_option_is_declared_once():
    found = declared()
    assert len(found) > 70 and {"block_size", "stop", "num_prompts"} <= found.keys()
    assert {name for name, several in found.items() if len(several) > 1} == SEVERAL.keys()


def test_options_of_an_engine_that_a_benchmark_sets_are_refused():
    with pytest.raises(WrongValues, match="engine has seed, max_num_seqs: leave out what"):
        DecodeConfig(engine=EngineOptions(max_num_seqs=2, seed=1))
    with pytest.raises(WrongValues, match=r"^speedup: engine\.block_size is 0, must be from 1 to"):
        SpeedupConfig(engine={"block_size": 0})


def test_a_mapping_changes_the_default_of_a_benchmark():
    made = DecodeConfig(engine={"block_size": 8})
    assert made.engine.max_num_batched_tokens == 8192 and not made.engine.enable_prefix_caching
    shown = options_of(made)
    assert shown["block_size"] == 8 and shown["repetition_penalty"] == 1.0
    assert {"engine", "penalties", "max_num_seqs", "temperature"}.isdisjoint(shown)


def refuses(cls: Any, name: str, value: object) -> bool:
    needed = {"max_model_len": 64} if cls is EngineConfig else {"model": "x"}
    try:
        cls(**needed | {name: value})
    except WrongValues as error:
        return any(clause.startswith(name) for clause in error.clauses)
    return False


@each("name", [one for one in keys_of(EngineConfig) if one in keys_of(LLMOptions)])
def test_what_options_refuse_an_engine_refuses(name):
    refused = [value for value in VALUES if refuses(LLMOptions, name, value)]
    assert refused and all(refuses(EngineConfig, name, value) for value in refused)
