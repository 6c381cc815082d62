"""Streams of a GPU in plain Python: they do what they were asked for late, in any order that their
waits allow."""

import random
import threading
from contextlib import contextmanager


class Event:
    def __init__(self, blocking=False):
        self.stream = None
        self.place = 0

    @property
    def passed(self):
        return self.stream is None or self.stream.done >= self.place

    def synchronize(self):
        self.stream.device.run_until(lambda: self.passed)


class Stream:
    def __init__(self, device, priority=0):
        self.device = device
        self.asked = []
        self.done = 0
        device.streams.append(self)

    def ask(self, call):
        """`call` is an event to wait for, or is called."""
        with self.device.lock:
            self.asked.append(call)
            self.device.run(self.device.random.randrange(3))

    def record_event(self, event=None):
        event = event or Event()
        event.stream = self
        event.place = len(self.asked)
        return event

    def wait_stream(self, other):
        self.ask(other.record_event())

    def synchronize(self):
        self.record_event().synchronize()

    @property
    def ready(self):
        if self.done == len(self.asked):
            return False
        head = self.asked[self.done]
        return head.passed if isinstance(head, Event) else True


class Device:
    """Stands for `torch.cuda` once `install` was called."""

    def __init__(self, seed):
        self.random, self.lock, self.streams = random.Random(seed), threading.RLock(), []
        self.main, self._local = Stream(self), threading.local()

    def install(self, monkeypatch, cuda):
        """Replace what the code under test uses of the module `cuda`."""
        names = dict(
            Event=Event,
            current_stream=self.current,
            stream=self.within,
            set_device=lambda device: None,
        )
        for name, value in (names | dict(Stream=lambda priority=0: Stream(self, priority))).items():
            monkeypatch.setattr(cuda, name, value)

    def current(self):
        return getattr(self._local, "stream", self.main)

    @contextmanager
    def within(self, stream):
        before = self.current()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def run(self, steps):
        """At most so many steps of streams that can go on; whether there was any."""
        with self.lock:
            for _ in range(steps):
                ready = [stream for stream in self.streams if stream.ready]
                if not ready:
                    return False
                stream = self.random.choice(ready)
                head = stream.asked[stream.done]
                if not isinstance(head, Event):
                    head()
                stream.done += 1
        return True

    def run_until(self, reached):
        while not reached():
            assert self.run(1) or reached(), "streams that wait for each other"
