"""Checked classes: values of every kind, and one line that names all that are wrong."""

import copy
import dataclasses
import pickle
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field, field_validator

from mtpkit.config.checked import (
    WrongValues,
    attempt,
    checked,
    field_of,
    fields_of,
    from_file,
    keys_of,
)
from mtpkit.errors import UserError
from tests.shared import each

INF = float("inf")


@checked("loss", prefix="loss_")
class Loss:
    kind: Literal["kl", "tv"] = "kl"
    beta: Annotated[float, Field(gt=0, le=1)] = 0.5
    depths: int = Field(default=3, validation_alias="num_depths", gt=0)
    weights: tuple[float, ...] = ()
    pair: tuple[float, Annotated[float, Field(allow_inf_nan=True)]] = (0.0, INF)
    seed: Annotated[int, Field(ge=0)] | None = None
    scale: Annotated[int | float, Field(lt=9)] = 1
    stop: str | tuple[str, ...] = Field(default=(), title="a text or texts")

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop):
        if "" in stop:
            raise ValueError("must not be empty")
        if "\n" in stop:
            raise ValueError("has line ends")
        return stop

    def problems(self):
        if self.kind == "tv" and self.beta < 0.2:
            yield "loss_beta is too small for tv"


@checked("run")
class Run:
    name: str
    steps: Annotated[int, Field(ge=1, le=64)] = 3
    quick: bool = False
    loss: Loss = Loss()


@checked("record")
class Record:
    ids: list[Annotated[int, Field(ge=0)]] = dataclasses.field(default_factory=list)
    sizes: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    losses: list[Loss] = dataclasses.field(default_factory=list)
    named: dict[str, Loss] = dataclasses.field(default_factory=dict)
    best: Loss | None = None
    notes: list[dict[str, Any]] | None = None


def test_records_of_files_hold_lists_and_objects():
    values = {
        "ids": (1, 2),
        "sizes": {"a": [3]},
        "losses": [{"beta": 1}, Loss()],
        "named": {"b": {"seed": 3}},
    }
    record = from_file(Record, values | {"best": {}, "notes": [{"c": 1}]}, "file")
    assert record == Record(
        [1, 2], {"a": [3]}, [Loss(beta=1), Loss()], {"b": Loss(seed=3)}, Loss(), [{"c": 1}]
    )
    assert from_file(Record, {}, "file") == Record()


@each(
    ("values", "message"),
    [
        ([], "file:1 is [], must be an object"),
        ({"ids": 3}, "file:1: ids is 3, must be a list of whole numbers"),
        ({"ids": [3, 4.5]}, "file:1: ids[1] is 4.5, must be a whole number"),
        ({"ids": [3, -1]}, "file:1: ids[1] is -1, must be at least 0"),
        ({"sizes": []}, "file:1: sizes is [], must be an object"),
        ({"sizes": {"a": [3, None]}}, "file:1: sizes['a'][1] is None, must be a whole number"),
        ({"losses": [{}, {"depths": 0}]}, "file:1: losses[1].num_depths is 0, must be positive"),
        ({"losses": {}}, "file:1: losses is {}, must be a list of groups of values"),
        ({"named": {"b": 3}}, "file:1: named['b'] is 3, must be a group of values"),
        ({"named": {"b": {"x": 3}}}, "file:1: named['b'].x is unknown"),
        ({"best": 3}, "file:1: best is 3, must be a group of values or None"),
        ({"best": {"kind": 3}}, "file:1: best.loss_kind is 3, must be 'kl' or 'tv'"),
        ({"notes": [3]}, "file:1: notes is [3], must be a list of objects or None"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(values, message):
    with pytest.raises(UserError) as caught:
        from_file(Record, values, "file:1")
    assert str(caught.value) == message


@each(
    ("values", "clauses"),
    [
        ({"steps": "3"}, ["steps is '3', must be a whole number"]),
        ({"steps": 3.0}, ["steps is 3.0, must be a whole number"]),
        ({"steps": True}, ["steps is True, must be a whole number"]),
        ({"steps": 0}, ["steps is 0, must be from 1 to 64"]),
        ({"steps": 10**400}, ["steps is a int, must be from 1 to 64"]),
        ({"name": b"a"}, ["name is b'a', must be a text"]),
        (
            {"quick": 1, "steps": None},
            ["steps is None, must be a whole number", "quick is 1, must be True or False"],
        ),
        ({"loss": 3}, ["loss is 3, must be a group of values"]),
        ({"stepz": 3, "a\nb": 1}, ["stepz is unknown", r"'a\nb' is unknown"]),
        (
            {"steps": 65, "loss": {"kind": "l2", "loss_beta": 0, "num_depths": 0, "x": 1}},
            [
                "loss.loss_kind is 'l2', must be 'kl' or 'tv'",
                "loss.loss_beta is 0, must be above 0 and at most 1",
                "loss.num_depths is 0, must be positive",
                "loss.x is unknown",
                "steps is 65, must be from 1 to 64",
            ],
        ),
        ({"loss": {"kind": "tv", "beta": 0.1}}, ["loss.loss_beta is too small for tv"]),
        ({"loss": {"beta": float("nan")}}, ["loss.loss_beta is nan, must be a finite number"]),
        ({"loss": {"beta": 10**400}}, ["loss.loss_beta is a int, must be a finite number"]),
        (
            {"loss": {"weights": [1, INF]}},
            ["loss.loss_weights is [1, inf], must be a list of finite numbers"],
        ),
        (
            {"loss": {"weights": 1.0}},
            ["loss.loss_weights is 1.0, must be a list of finite numbers"],
        ),
        ({"loss": {"pair": [1]}}, ["loss.loss_pair is [1], must be a list of 2 finite numbers"]),
        ({"loss": {"seed": "x"}}, ["loss.loss_seed is 'x', must be a whole number or None"]),
        ({"loss": {"seed": -1}}, ["loss.loss_seed is -1, must be at least 0"]),
        ({"loss": {"scale": 9}}, ["loss.loss_scale is 9, must be below 9"]),
        ({"loss": {"scale": False}}, ["loss.loss_scale is False, must be a finite number"]),
        ({"loss": {"stop": ["a", 3]}}, ["loss.loss_stop is ['a', 3], must be a text or texts"]),
        ({"loss": {"stop": ["a", ""]}}, ["loss.loss_stop is ['a', ''], must not be empty"]),
        ({"loss": {"stop": ["\n"]}}, ["loss.loss_stop has line ends"]),
    ],
)
def test_every_wrong_value_is_named(values, clauses):
    with pytest.raises(UserError) as caught:
        Run(**{"name": "a"} | values)
    assert isinstance(caught.value, WrongValues) and caught.value.clauses == clauses
    assert str(caught.value) == f"run: {'; '.join(clauses)}" and caught.value.exit_code == 2


def test_what_is_missing_is_named():
    with pytest.raises(UserError, match=r"^run: name is missing$"):
        Run()


def test_positions_names_and_keys():
    assert keys_of(Loss)["depths"] == "num_depths" and keys_of(Loss)["kind"] == "loss_kind"
    assert Run("a", 5) == Run(name="a", steps=5)
    assert Loss(depths=4, beta=1) == Loss(num_depths=4, loss_beta=1)
    with pytest.raises(UserError, match="steps is 'b'"):
        Run("a", "b")


def test_values_become_those_of_the_types_declared():
    loss = Loss(
        beta=np.float32(0.5),
        depths=np.int64(2),
        weights=[1, np.float64(2)],
        pair=(0, INF),
        seed=np.uint8(3),
    )
    assert loss == Loss(depths=2, weights=(1.0, 2.0), seed=3)
    assert [type(loss.beta), type(loss.depths), *map(type, loss.weights)] == [
        float,
        int,
        float,
        float,
    ]
    assert type(Loss(scale=2).scale) is int, "int | float keeps what was given"


def test_they_are_frozen_and_made_anew_by_replace():
    run = Run("a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.steps = 4
    assert dataclasses.replace(run, loss={"depths": 1}).loss.depths == 1
    with pytest.raises(UserError, match="steps is 0"):
        dataclasses.replace(run, steps=0)
    assert copy.deepcopy(run) == pickle.loads(pickle.dumps(run)) == run and hash(run) == hash(
        Run("a")
    )


def test_clauses_of_several_objects_can_be_gathered():
    clauses = []
    assert attempt(Loss, {"kind": "x"}, clauses) is None and attempt(Run, {}, clauses) is None
    assert attempt(Loss, {}, clauses) == Loss()
    assert clauses == ["loss_kind is 'x', must be 'kl' or 'tv'", "name is missing"]


@checked("shared")
class Shared:
    most: Annotated[int, Field(ge=1, le=9)] | None = None
    """Most things."""
    sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1,), title="a list of sizes")
    """Sizes of things."""
    kind: Literal["a", "b"] = "a"
    """Kind of things."""


@checked("sharing")
class Sharing:
    most: int | None = field_of(Shared, "most")
    least: int | None = field_of(Shared, "most", default=3)
    """Least things: 3, unless told."""
    lengths: tuple[int, ...] = field_of(Shared, "sizes")
    kind: Literal["a", "b"] = field_of(Shared, "kind", default="b")
    """Kind, "b" by default, since most are."""


def test_a_shared_field_brings_all_but_its_key():
    fields = fields_of(Sharing)
    assert [info.description for info in fields.values()] == [
        "Most things.",
        "Least things: 3, unless told.",
        "Sizes of things.",
        'Kind, "b" by default, since most are.',
    ]
    assert Sharing() == Sharing(None, 3, (1,), "b") and Shared() == Shared(None, (1,), "a")
    assert list(keys_of(Sharing).values()) == ["most", "least", "lengths", "kind"]


@each(
    ("values", "says"),
    [
        ({"most": 0}, "most is 0, must be from 1 to 9"),
        ({"least": 10}, "least is 10, must be from 1 to 9"),
        ({"lengths": [0]}, "lengths is [0], must be at least 1"),
        ({"lengths": 5}, "lengths is 5, must be a list of sizes"),
        ({"kind": "c"}, "kind is 'c', must be 'a' or 'b'"),
    ],
)
def test_a_shared_field_refuses_what_the_other_refuses(values, says):
    with pytest.raises(UserError) as caught:
        Sharing(**values)
    assert str(caught.value) == f"sharing: {says}"


def test_a_shared_field_is_written_with_the_type_that_it_has():
    with pytest.raises(
        TypeError, match=r"^Wrong\.most is written as <class 'int'>, but the shared .*\[int\]$"
    ):

        @checked("wrong")
        class Wrong:
            most: int = field_of(Shared, "most")
