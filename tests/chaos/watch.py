"""Samples of a server's resources, and its own counters."""

from __future__ import annotations

import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

_SECONDS = 2.0
_OUTCOMES = re.compile(r"^tensorferry_requests_total\{(?P<labels>[^}]*)\} (?P<count>\S+)$", re.M)
_ACCEPTED = re.compile(r"^tensorferry_requests_accepted_total\{(?P<labels>[^}]*)\} (?P<count>\S+)$", re.M)
_GAUGES = re.compile(r"^tensorferry_(?:queued|running)_requests\{[^}]*\} (?P<count>\S+)$", re.M)
_CALL_THREADS = re.compile(r"^tensorferry_call_threads (?P<count>\S+)$", re.M)
_MODEL = re.compile(r'model="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a process: resident bytes, open files, and threads outside the pools for calls.

    A pool has as many threads as calls were ever in progress at once, up to its bound.
    """

    at: float
    server: str
    pid: int
    rss: int
    files: int
    threads: int


class Watch:
    """Samples the processes of `pids` every two seconds until `close`; `pages` has the metrics of
    some.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]], pages: Mapping[str, str]) -> None:
        self.samples: list[Sample] = []
        self._pids = pids
        self._pages = pages
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._ended.wait(_SECONDS):
            for server, pid in self._pids().items():
                if (sample := sample_of(server, pid, self._pages.get(server))) is not None:
                    self.samples.append(sample)


def sample_of(server: str, pid: int, page: str | None = None) -> Sample | None:
    """Return a sample of the process; None if it has ended, or if its metrics do not list its pools."""
    home = Path("/proc") / str(pid)
    try:
        status = (home / "status").read_text()
        files = len(os.listdir(home / "fd"))
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines())
    if "VmRSS" not in fields:
        return None
    rss = int(fields["VmRSS"].split()[0]) << 10
    pooled = 0.0
    if page is not None:
        try:
            with urllib.request.urlopen(page, timeout=_SECONDS) as response:
                (pooled,) = map(float, _CALL_THREADS.findall(response.read().decode()))
        except (OSError, HTTPException):
            # The server is frozen, or has no file left.
            return None
    return Sample(time.monotonic(), server, pid, rss, files, int(fields["Threads"]) - round(pooled))


def reconcile(url: str, patience: float) -> Mapping[str, tuple[int, int]]:
    """Return, once the server is quiet, the requests that each model accepted, and its counted
    outcomes.
    """
    until = time.monotonic() + patience
    while True:
        with urllib.request.urlopen(url, timeout=patience) as response:
            page = response.read().decode()
        if not any(float(gauge["count"]) for gauge in _GAUGES.finditer(page)) or time.monotonic() > until:
            break
        time.sleep(0.1)
    accepted = _by_model(_ACCEPTED, page)
    outcomes = _by_model(_OUTCOMES, page)
    return {model: (count, outcomes.get(model, 0)) for model, count in accepted.items()}


def _by_model(lines: re.Pattern[str], page: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in lines.finditer(page):
        model = _MODEL.search(line["labels"])
        name = model[1] if model else ""
        found[name] = found.get(name, 0) + int(float(line["count"]))
    return found
