"""The lock rule: methods of objects that the queue's lock guards are called with that lock only.

A class is guarded if its docstring says "Guarded by the queue's lock". Its methods need not have names that end in
`_locked`. Those whose docstrings say "without the lock" or "Thread-safe" are excepted.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.batcher.interleave import Interleaver, Lock
from support.batcher.rig import ignore, new_request

import tensorferry.batcher
from tensorferry.batcher import (
    Batcher,
    BatcherError,
    ClientPolicy,
    InstanceFailed,
    QueuePolicy,
    Request,
    RunTimedOut,
)

# Every option that has an object of its own in the queue is in one of these.
WORLDS: tuple[dict[str, Any], ...] = (
    {},
    {"max_queue_delay": 0.02, "preferred_batch_sizes": (2,)},
    {"priority_weights": (2, 1), "max_queue_size": 6, "pipelined": True},
    {"policies": (QueuePolicy(0.01, delays=True, overridable=True, max_requests=9),)},
    {"policies": (QueuePolicy(0.01),)},
    {"clients": ClientPolicy(rate=500.0, burst=30, max_rows=30, fair=True), "max_queue_size": 8},
    {"clients": ClientPolicy(fair=True)},
)


def guarded_methods() -> Iterator[tuple[type, str, Callable[..., Any] | property]]:
    for module in pkgutil.walk_packages(tensorferry.batcher.__path__, "tensorferry.batcher."):
        for cls in vars(import_module(module.name)).values():
            if inspect.isclass(cls) and cls.__module__ == module.name and is_guarded(cls):
                for name, method in vars(cls).items():
                    exempt = any(
                        word in (method.__doc__ or "") for word in ("without the lock", "Thread-safe")
                    )
                    method_or_property = inspect.isfunction(method) or isinstance(method, property)
                    if method_or_property and not exempt and not name.startswith("_"):
                        yield cls, name, method


def is_guarded(cls: type) -> bool:
    return "guarded by the queue's lock" in " ".join((cls.__doc__ or "").split()).lower()


class Rule:
    """Notes each call of a guarded method, and whether the calling thread held the lock."""

    def __init__(self, interleaver: Interleaver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lock = Lock(interleaver)
        self.never_called: set[str] = set()
        self.called_without: set[str] = set()
        self.methods = 0
        interleaver.install(monkeypatch)
        queue = import_module("tensorferry.batcher.queue.request_queue")
        fakes = SimpleNamespace(**{**vars(queue.threading), "Lock": lambda: self.lock})
        monkeypatch.setattr(queue, "threading", fakes)
        for cls, name, method in guarded_methods():
            self.methods += 1
            title = f"{cls.__qualname__}.{name}"
            self.never_called.add(title)
            checked: Any = (
                property(self.checked(method.fget, title))
                if isinstance(method, property)
                else self.checked(method, title)
            )
            monkeypatch.setattr(cls, name, checked)

    def checked(self, method: Any, title: str) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            # Not raised, because a worker goes on after an exception.
            if not self.lock.held_by_this_thread:
                self.called_without.add(title)
            self.never_called.discard(title)
            return method(*arguments, **options)

        return call


class Load:
    """A batcher of each world in turn, under load, with every fault that the queue handles."""

    def __init__(self, interleaver: Interleaver) -> None:
        self.interleaver = interleaver
        self.recoveries = 0

    def run(self) -> None:
        for world in WORLDS:
            with Batcher(
                [self.model_fn, self.model_fn],
                4,
                clock=self.interleaver.clock,
                batch_started=self.batch_started,
                **world,
            ) as batcher:
                batcher.add_warmup_sample(1, 0.003)
                for turn in range(200):
                    self.send(batcher, turn)
                batcher.statistics()
                batcher.drain()

    def send(self, batcher: Batcher, turn: int) -> None:
        # In turns 60 to 120 more arrive than can be answered in time.
        shape = (9 if turn == 50 else turn % 3, 2 if turn in (125, 126, 127) else 1)
        deadline = self.interleaver.now() + 0.04 if turn % 4 else np.inf
        x = np.full(shape, turn)
        request = new_request(x, ignore, deadline=deadline)
        request.client, request.priority = f"client {turn % 3}", turn % (batcher.priorities + 1)
        try:
            batcher.queue_full()
            batcher.fast_reject(deadline)
            if not request.rows and turn % 2:
                batcher.answer_without_run(request, x)
            else:
                batcher.enqueue(request)
        except BatcherError:
            pass
        if turn % 13 == 0:
            batcher.cancel(request)
            batcher.least_time(1)
        if turn % 4 == 3 and not 60 < turn < 120:
            self.interleaver.sleep(0.006)
        if turn == 198:
            for device in (0, 1):
                batcher.abort_hung_run(device, RunTimedOut("too long"))

    def model_fn(self, x: Any) -> Any:
        self.interleaver.sleep(0.03 if 148 in x else 0.003 * len(x))
        if 40 in x and len(x) > 1:
            raise MemoryError
        if 20 in x or 180 in x:
            raise InstanceFailed("the device is gone", 0.001, self.recover)
        return x

    def recover(self) -> None:
        self.recoveries += 1
        if self.recoveries % 2:
            raise InstanceFailed("not yet", 0.001)

    def batch_started(self, batch: Sequence[Request]) -> None:
        if any(136 in request.tensors[0].data for request in batch):
            raise SystemExit


def test_guarded_methods_are_called_with_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    interleaver = Interleaver(0)
    rule = Rule(interleaver, monkeypatch)
    interleaver.run(Load(interleaver).run)
    assert rule.called_without == set()
    assert len(rule.never_called) < rule.methods / 10, f"the load shows nothing of {rule.never_called}"
