"""Overhead of the scheduler: one thread submits to the real batcher, whose model does nothing.

    python benchmarks/overhead.py [--requests 20000] [--rounds 5] [--batches 2000]

Prints the time per request, from building it to its completion, and for comparison that of a bare
`queue.SimpleQueue` (put and get by two threads). Values are medians of the rounds. On one core they
are the work of both threads. On all cores they are mostly waits for the interpreter's lock.

The next value is the time of a request whose batch runs on the thread that enqueued it, alone or
with 31 others; and that of a request that passes so through a pipeline of one to three stages.

The last values, from separate runs, are how long the worker holds the queue's lock for each batch of
64 rows while 64 or 4096 rows are queued; as many arrive as are taken. One value is by the clock,
including time in which the system takes the core from the thread, the other is CPU time. No other
thread runs meanwhile.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np

import tensorferry.batcher.queue.request_queue as queue_module
from tensorferry.batcher import Batcher, Outcome, Pipeline, Request, Stage, Tensor

_RAW = np.zeros(4, np.float32).tobytes()
_ROWS = 64
_WARM_UP = 50
_TENSORS = (Tensor(np.dtype(np.float32), (1, 4), _RAW),)


def batcher_seconds(requests: int, timeout: float) -> tuple[float, float]:
    """Return seconds per request through the batcher, and rows of a batch."""
    left, done = requests, threading.Event()

    def complete(outcome: Outcome) -> None:
        # Called on the worker's thread only.
        nonlocal left
        left -= 1
        if not left:
            done.set()

    def nothing(x: Any) -> Any:
        return x

    with Batcher(nothing, 64, max_queue_size=requests) as batcher:
        started = time.perf_counter()
        for _ in range(requests):
            deadline = time.monotonic() + timeout
            batcher.enqueue(
                Request(_TENSORS, complete, names=None, rows=1, nbytes=16, key=(4,), deadline=deadline)
            )
        done.wait()
        took = time.perf_counter() - started
        batches = batcher.statistics().batches
    return took / requests, requests / batches


def inline_seconds(requests: int, at_once: int) -> float:
    """Return seconds per request on one thread that enqueues several and runs their batch itself."""
    with Batcher(lambda x: x, 64) as batcher:
        for rows in (1, 64):
            batcher.add_warmup_sample(rows, 1e-5)
        started = time.perf_counter()
        for _ in range(requests // at_once):
            for _ in range(at_once):
                batcher.enqueue(
                    Request(_TENSORS, _ignore, names=None, rows=1, nbytes=16, key=(4,), deadline=math.inf),
                    notify=False,
                )
            batcher.run_inline(1.0)
        return (time.perf_counter() - started) / (requests // at_once * at_once)


def pipeline_seconds(requests: int, at_once: int, stages: int, timeout: float) -> float:
    """Return seconds per request on one thread that takes several at once through all stages."""
    batchers = [Batcher(lambda x: x, 64) for _ in range(stages)]
    for batcher in batchers:
        for rows in (1, 64):
            batcher.add_warmup_sample(rows, 1e-5)
    pipeline = Pipeline(
        "pipeline",
        [
            Stage(f"{number}", batcher, {"x": f"{number}"}, {"x": f"{number + 1}"})
            for number, batcher in enumerate(batchers)
        ],
        inputs=["0"],
        outputs=[f"{stages}"],
    )
    names = ("0",)
    with pipeline:
        started = time.perf_counter()
        for _ in range(requests // at_once):
            for _ in range(at_once):
                deadline = time.monotonic() + timeout
                pipeline.enqueue(
                    Request(_TENSORS, _ignore, names=names, rows=1, nbytes=16, deadline=deadline),
                    notify=False,
                )
            pipeline.run_inline(1.0)
        return (time.perf_counter() - started) / (requests // at_once * at_once)


@contextmanager
def one_core() -> Iterator[None]:
    """Pin this thread, and those that it starts, to one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def queue_seconds(requests: int) -> float:
    """Return seconds per item through a bare queue between two threads."""
    items: queue.SimpleQueue[object] = queue.SimpleQueue()

    def drain() -> None:
        for _ in range(requests):
            items.get()

    thread = threading.Thread(target=drain)
    started = time.perf_counter()
    thread.start()
    for _ in range(requests):
        items.put(None)
    thread.join()
    return (time.perf_counter() - started) / requests


class TimedLock:
    """A lock that records how long one thread holds it each time; conditions can use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = self._cpu_since = 0.0
        # Identifier of the timed thread, and its times by the clock and of CPU; only that thread
        # writes them.
        self.watched: int | None = None
        self.holds: list[tuple[float, float]] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.Lock`."""
        got = self._lock.acquire(blocking, timeout)
        if got and self.watched == threading.get_ident():
            self._cpu_since = time.thread_time()
            self._since = time.perf_counter()
        return got

    def release(self) -> None:
        """See `threading.Lock`."""
        if self.watched == threading.get_ident():
            held = time.perf_counter() - self._since
            self.holds.append((held, time.thread_time() - self._cpu_since))
        self._lock.release()

    def locked(self) -> bool:
        """See `threading.Lock`."""
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Threading:
    """The module `threading` with timed locks."""

    Lock = TimedLock

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


def lock_seconds(batches: int, waiting: int, timeout: float) -> list[list[tuple[float, float]]]:
    """Return how long the worker held the queue's lock for each batch: by the clock, and CPU time."""
    held: list[list[tuple[float, float]]] = []
    gate, done = threading.Event(), threading.Event()

    def enqueue(count: int) -> None:
        deadline = time.monotonic() + timeout
        for _ in range(count):
            batcher.enqueue(
                Request(_TENSORS, _ignore, names=None, rows=1, nbytes=16, key=(4,), deadline=deadline)
            )

    def refill(x: Any) -> Any:
        """The model function: records the lock's time, and enqueues as many requests as it got."""
        gate.wait()
        lock.watched = None
        held.append(lock.holds)
        if len(held) < batches:
            enqueue(len(x))
        else:
            done.set()
        lock.holds, lock.watched = [], threading.get_ident()
        return x

    with patch.object(queue_module, "threading", _Threading()):
        batcher = Batcher(refill, _ROWS, max_queue_size=2 * (waiting + _ROWS))
    lock: Any = batcher._queue._lock
    if not isinstance(lock, TimedLock):
        raise RuntimeError("the queue's lock cannot be timed")
    with batcher:
        # The first request keeps the worker busy while the others are queued.
        enqueue(1 + waiting)
        gate.set()
        done.wait()
    return held[_WARM_UP:batches]


def _ignore(outcome: Outcome) -> None:
    """Ignore the outcome."""


def print_lock_times(batches: int) -> None:
    """Print how long the lock is held."""
    print(f"the queue's lock, held by the worker, per batch of {_ROWS} rows:")
    for waiting in (64, 4096):
        for name, timeout in (("no deadlines", math.inf), ("deadlines", 60.0)):
            holds = lock_seconds(_WARM_UP + batches, waiting, timeout)
            for measure, kind in enumerate(("clock", "CPU")):
                times = [[hold[measure] for hold in held] for held in holds]
                figures = []
                for ordered in (sorted(map(sum, times)), sorted(map(max, times))):
                    p50, p99 = (ordered[math.ceil(len(ordered) * share) - 1] * 1e6 for share in (0.5, 0.99))
                    figures.append(f"p50 {p50:6.1f} us, p99 {p99:7.1f} us, max {ordered[-1] * 1e6:8.1f} us")
                print(
                    f"  {waiting:5d} waiting, {name:12s} {kind:5s} in all {figures[0]}; longest at once {figures[1]}"
                )


def print_times(cores: str, requests: int, rounds: int) -> None:
    """Print the time of a request, and the rows of a batch."""
    rows: dict[str, list[float]] = {"bare queue": [], "batcher, no deadlines": [], "batcher, deadlines": []}
    sizes: list[float] = []
    for _ in range(rounds):
        rows["bare queue"].append(queue_seconds(requests))
        for name, timeout in (("batcher, no deadlines", math.inf), ("batcher, deadlines", 60.0)):
            seconds, size = batcher_seconds(requests, timeout)
            rows[name].append(seconds)
            sizes.append(size)
    for name, values in rows.items():
        print(
            f"{cores:10s} {name:22s} {statistics.median(values) * 1e6:6.2f} us a request "
            f"(from {min(values) * 1e6:.2f} to {max(values) * 1e6:.2f})"
        )
    print(f"{cores:10s} mean batch: {statistics.median(sizes):.1f} rows")


def print_inline_times(requests: int, rounds: int) -> None:
    """Print the time of a request whose batch runs inline."""
    for at_once in (1, 32):
        values = [inline_seconds(requests // 4, at_once) * 1e6 for _ in range(rounds)]
        print(
            f"run by the thread that submits them, {at_once:2d} at once: "
            f"{statistics.median(values):6.2f} us a request (from {min(values):.2f} to {max(values):.2f})"
        )


def print_pipeline_times(requests: int, rounds: int) -> None:
    """Print the time of a request in pipelines, all of whose stages run inline."""
    for at_once in (1, 32):
        for name, timeout in (("no deadlines", math.inf), ("deadlines", 60.0)):
            figures = []
            for stages in (1, 2, 3):
                values = [pipeline_seconds(requests // 4, at_once, stages, timeout) for _ in range(rounds)]
                figures.append(f"{stages}: {statistics.median(values) * 1e6:6.2f}")
            print(
                f"through a pipeline, {at_once:2d} at once, {name:12s}: us a request by stages {', '.join(figures)}"
            )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=2000, help="whose lock time is measured")
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.rounds, arguments.batches = 4000, 1, 200
    for cores, limit in (("one core", one_core()), ("all cores", nullcontext())):
        with limit:
            print_times(cores, arguments.requests, arguments.rounds)
    print_inline_times(arguments.requests, arguments.rounds)
    print_pipeline_times(arguments.requests, arguments.rounds)
    print_lock_times(arguments.batches)


if __name__ == "__main__":
    main()
