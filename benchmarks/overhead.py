"""What the scheduler costs: one thread submits to the real batcher, whose runner does nothing.

    python benchmarks/overhead.py [--requests 20000] [--rounds 5]

Prints the time per request, from building it to its completion, of both threads together, and
for comparison that of `queue.SimpleQueue` alone (put and get by two threads). Medians of the
rounds, taken in turn.
"""

from __future__ import annotations

import argparse
import math
import queue
import statistics
import threading
import time
from typing import Any

import numpy as np

from tensorferry.batcher import Batcher, Outcome, Request, Tensor

_RAW = np.zeros(4, np.float32).tobytes()
_TENSORS = (Tensor(np.dtype(np.float32), (1, 4), _RAW),)


def batcher_seconds(requests: int, timeout: float) -> tuple[float, float]:
    """Seconds per request through the batcher, and rows of a batch."""
    done = threading.Semaphore(0)

    def complete(outcome: Outcome) -> None:
        done.release()

    def nothing(x: Any) -> Any:
        return x

    with Batcher(nothing, 64, max_queue_size=requests) as batcher:
        started = time.perf_counter()
        for _ in range(requests):
            deadline = time.monotonic() + timeout
            batcher.enqueue(
                Request(_TENSORS, complete, names=None, rows=1, nbytes=16, key=(4,), deadline=deadline)
            )
        for _ in range(requests):
            done.acquire()
        took = time.perf_counter() - started
        batches = batcher.statistics().batches
    return took / requests, requests / batches


def queue_seconds(requests: int) -> float:
    """Seconds per item through a bare queue between two threads."""
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


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows: dict[str, list[float]] = {"bare queue": [], "batcher, no deadlines": [], "batcher, deadlines": []}
    sizes: list[float] = []
    for _ in range(arguments.rounds):
        rows["bare queue"].append(queue_seconds(arguments.requests))
        for name, timeout in (("batcher, no deadlines", math.inf), ("batcher, deadlines", 60.0)):
            seconds, size = batcher_seconds(arguments.requests, timeout)
            rows[name].append(seconds)
            sizes.append(size)
    for name, values in rows.items():
        print(
            f"{name:22s} {statistics.median(values) * 1e6:6.2f} us a request (from {min(values) * 1e6:.2f} to {max(values) * 1e6:.2f})"
        )
    print(f"mean batch: {statistics.median(sizes):.1f} rows")


if __name__ == "__main__":
    main()
