"""Signals that come at bad moments."""

import os
import signal

import pytest

from mtpkit.training.signals import StopSignal


@pytest.fixture
def handlers():
    """Python's own, whatever the parent has; put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt_before(monkeypatch, restored):
    """Ctrl-C just as the handler of a signal is to be restored."""
    change = signal.signal

    def interrupted(number, handler):
        if number == restored:
            monkeypatch.setattr(signal, "signal", change)
            signal.raise_signal(signal.SIGINT)
        return change(number, handler)

    monkeypatch.setattr(signal, "signal", interrupted)


def test_ctrl_c_while_its_handler_is_restored_is_the_first(handlers, monkeypatch):
    term = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        interrupt_before(monkeypatch, signal.SIGINT)
    assert stop.interrupted
    assert (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and signal.getsignal(signal.SIGTERM) is term
    )


def test_ctrl_c_while_another_handler_is_restored_is_pythons_own(handlers, monkeypatch):
    with pytest.raises(KeyboardInterrupt), StopSignal() as stop:
        interrupt_before(monkeypatch, signal.SIGTERM)
    assert not stop.interrupted and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_each_signal_is_answered_once(handlers, capfd):
    with pytest.raises(KeyboardInterrupt), StopSignal():
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        said = capfd.readouterr().err.split("\n")
        signal.raise_signal(signal.SIGINT)
    first, second = filter(None, said)
    assert first == "mtpkit: the run saves and ends after this step"
    assert second == f"{first}; a second Ctrl-C ends it at once"


def test_a_sigterm_after_a_saved_run_does_not_kill_it(handlers):
    """A scheduler and a launcher say it in their own time. Without a first one, the next has its
    usual effect."""
    term = signal.getsignal(signal.SIGTERM)
    with StopSignal():
        pass
    assert signal.getsignal(signal.SIGTERM) is term
    with StopSignal():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_signal_is_noted_where_stderr_is_gone(handlers):
    """Standard error is a closed terminal, or a pipe whose reader has ended."""
    stderr, (reader, writer) = os.dup(2), os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGINT)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(writer)
    assert stop.interrupted
