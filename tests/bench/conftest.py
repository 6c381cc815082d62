"""The rates of the machine are measured once in a process."""

import functools

import pytest

from mtpkit.bench import machine

once = functools.cache(machine._measure_rates)


@pytest.fixture(autouse=True)
def rates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark measures them each time, which takes as long as a test needs for the rest."""
    monkeypatch.setattr(machine, "_measure_rates", once)
