"""Samples of a server's resources, and its own counters."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from statistics import fmean

from prometheus_client.parser import text_string_to_metric_families
from support.processes import observed

_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the processes of a role, per process: memory (PSS) in bytes, open files, and threads.

    Of a server of one process, threads in the pools for calls do not count. A pool has as many threads as calls were
    ever in progress at once, up to its bound.
    """

    at: float
    role: str
    memory: float
    files: float
    threads: float


class Watch:
    """Samples the processes of each role every two seconds until `close`. `page` has the metrics of a server of one process."""

    def __init__(self, processes: Callable[[], Mapping[str, Sequence[int]]], page: str | None) -> None:
        self.samples: list[Sample] = []
        # The files in /dev/shm that any process had mapped.
        self.in_dev_shm: set[str] = set()
        self._processes = processes
        self._page = page
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._ended.wait(_SECONDS):
            for role, ids in self._processes().items():
                if (sample := sample_of(role, ids, self._page)) is not None:
                    self.samples.append(sample)
                for process in ids:
                    self.in_dev_shm.update(observed.in_dev_shm(process))


def sample_of(role: str, ids: Sequence[int], page: str | None = None) -> Sample | None:
    """Return a sample of the processes; None if one has ended, if there is none, or if the page does not list the pools."""
    try:
        held = [observed.held(process) for process in ids]
    except OSError:
        return None
    if not held:
        return None
    pooled = 0.0
    if page is not None:
        try:
            (pooled,) = _by_model(page, "tensorferry_call_threads", timeout=_SECONDS).values()
        except (OSError, HTTPException):
            # The server is frozen, or has no file left.
            return None
    return Sample(
        time.monotonic(),
        role,
        fmean(one.memory for one in held),
        fmean(one.files for one in held),
        fmean(one.threads for one in held) - pooled,
    )


def reconcile(url: str, patience: float) -> Mapping[str, tuple[int, int]]:
    """Return, once the server is quiet, the requests that each model accepted, and its counted
    outcomes.
    """
    until = time.monotonic() + patience
    unfinished = ("tensorferry_queued_requests", "tensorferry_running_requests")
    while any(_by_model(url, *unfinished, timeout=patience).values()) and time.monotonic() < until:
        time.sleep(0.1)
    accepted = _by_model(url, "tensorferry_requests_accepted_total", timeout=patience)
    outcomes = _by_model(url, "tensorferry_requests_total", timeout=patience)
    return {model: (count, outcomes[model]) for model, count in accepted.items()}


def living_sequences(url: str) -> int:
    """Return the number of living sequences and of the bytes of their states, added."""
    return sum(_by_model(url, "tensorferry_sequences", "tensorferry_state_bytes", timeout=30.0).values())


def _by_model(url: str, *names: str, timeout: float) -> Counter[str]:
    """Return the sums of metrics by their label `model`."""
    with urllib.request.urlopen(url, timeout=timeout) as response:
        page = response.read().decode()
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in names:
                found[sample.labels.get("model", "")] += int(sample.value)
    return found
