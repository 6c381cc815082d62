"""Rules for what users set, as tables by name: every value that breaks its rule is named in one error."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtpkit.config import LARGEST_COUNT
from mtpkit.errors import shown

Test = Callable[[Any], bool]

_LARGEST = torch.finfo(torch.float32).max
"""Beyond it a number is infinite to the device."""


def is_whole(value: Any) -> bool:
    """Whether it is an integer, also one of numpy; True and False are none."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_number(value: Any) -> bool:
    """Whether it is a finite number, also one of numpy; True and False are none."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and bool(abs(value) <= _LARGEST)


def is_flag(value: Any) -> bool:
    """Whether it is True or False."""
    return isinstance(value, bool | np.bool_)


def is_text(value: Any) -> bool:
    """Whether it is a string."""
    return isinstance(value, str)


def is_path(value: Any) -> bool:
    """Whether it can name a file or directory."""
    return isinstance(value, str | Path)


def is_list(value: Any) -> bool:
    """Whether it is a list, tuple, range or set; texts and bytes are none."""
    return isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray | memoryview)


def is_list_of(test: Test) -> Test:
    """Whether it is a list of what passes `test`."""
    return lambda value: is_list(value) and all(map(test, value))


def plain(value: Any) -> Any:
    """Numbers and flags as Python's own, and lists of them as tuples; everything else as it is."""
    if is_flag(value):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return tuple(map(plain, value)) if is_list(value) else value


@dataclass(frozen=True)
class Rule:
    """What a setting may be: first its kind, then, among those of that kind, its value."""

    kind: str
    is_kind: Test
    limits: str = ""
    """What to say of a value that is of the kind and does not fit."""
    fits: Test = lambda value: True

    def problem(self, value: Any) -> str | None:
        """What to say of `value`; None: it follows the rule."""
        if not self.is_kind(value):
            return f"must be {self.kind}"
        return None if self.fits(value) else self.limits


FLAG = Rule("True or False", is_flag)


def whole(limits: str, fits: Test) -> Rule:
    """An integer that fits."""
    return Rule("a whole number", is_whole, limits, fits)


def within(least: int, most: int) -> Rule:
    """An integer from `least` to `most`."""
    return whole(f"must be from {least} to {most}", lambda value: least <= value <= most)


def at_least(least: int) -> Rule:
    """An integer from `least` on that can count something."""
    return within(least, LARGEST_COUNT)


def number(limits: str, fits: Test) -> Rule:
    """A finite number that fits."""
    return Rule("a finite number", is_number, limits, fits)


def choice(*names: str) -> Rule:
    """One of a few names."""
    *others, last = map(repr, names)
    return Rule(f"{', '.join(others)} or {last}", lambda value: is_text(value) and value in names)


def either(constant: str | None, rule: Rule) -> Rule:
    """`constant`, or what follows `rule`."""

    def is_constant(value: Any) -> bool:
        return value is None if constant is None else is_text(value) and value == constant

    return Rule(
        f"{rule.kind} or {constant!r}",
        lambda value: is_constant(value) or rule.is_kind(value),
        rule.limits,
        lambda value: is_constant(value) or rule.fits(value),
    )


def problems(rules: Mapping[str, Rule], values: Mapping[str, Any]) -> list[str]:
    """What to say of each value that breaks its rule."""
    found = {name: rule.problem(values[name]) for name, rule in rules.items()}
    return [f"{name} is {shown(values[name])}, {problem}" for name, problem in found.items() if problem]
