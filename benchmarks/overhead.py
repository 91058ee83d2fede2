"""Overhead of the scheduler: one thread submits to the real batcher, whose model does nothing.

    python benchmarks/overhead.py [--requests 20000] [--rounds 5]

Prints the time per request, from building it to its completion, and for comparison that of a bare
`queue.SimpleQueue` (put and get by two threads). Values are medians of the rounds. On one core they
are the work of both threads. On all cores they are mostly waits for the interpreter's lock.

The next value is the time of a request whose batch runs on the thread that enqueued it, alone or
with 31 others; and that of a request that passes so through a pipeline of one to three stages.

The last values are the time of a request to the model of examples/digits, run so by ONNX Runtime, and
of one that the cache answers.
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
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from tensorferry.batcher import AnswerCache, Batcher, Outcome, Pipeline, Request, Stage, Tensor

_DIGITS = Path(__file__).parents[1] / "examples" / "digits" / "digits.onnx"
_RAW = np.zeros(4, np.float32).tobytes()
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


def _ignore(outcome: Outcome) -> None:
    """Ignore the outcome."""


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


def digits_seconds(requests: int) -> tuple[float, float]:
    """Return seconds per request of one row to the digits model, run alone, and answered by the cache."""
    session = onnxruntime.InferenceSession(_DIGITS, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    image = np.load(_DIGITS.with_name("images.npy"))[:1]
    tensors = (Tensor(image.dtype, image.shape, image.tobytes()),)

    def request() -> Request:
        return Request(tensors, _ignore, names=("image",), rows=1, nbytes=image.nbytes, key=(8, 8))

    with Batcher(lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))) as batcher:
        batcher.add_warmup_sample(1, 1e-5)
        cache = AnswerCache(batcher, 1 << 20, by_rows=True)
        times = []
        for enqueue in (batcher.enqueue, cache.enqueue):
            started = time.perf_counter()
            for _ in range(requests):
                if enqueue(request(), notify=False):
                    batcher.run_inline(1.0)
            times.append((time.perf_counter() - started) / requests)
    run, hit = times
    return run, hit


def print_cache_times(requests: int, rounds: int) -> None:
    """Print the times of a run and of a hit, and their ratio."""
    pairs = [digits_seconds(requests // 4) for _ in range(rounds)]
    run, hit = (statistics.median(values) * 1e6 for values in zip(*pairs, strict=True))
    ratio = statistics.median(hit / run for run, hit in pairs)
    print(f"digits: {run:6.2f} us a request that runs, {hit:6.2f} us one that the cache answers: {ratio:.2f}")


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
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.rounds = 4000, 1
    for cores, limit in (("one core", one_core()), ("all cores", nullcontext())):
        with limit:
            print_times(cores, arguments.requests, arguments.rounds)
    print_inline_times(arguments.requests, arguments.rounds)
    print_pipeline_times(arguments.requests, arguments.rounds)
    with one_core():
        print_cache_times(arguments.requests, arguments.rounds)


if __name__ == "__main__":
    main()
