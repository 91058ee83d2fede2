"""Requests that may have ended a process: which do so is found, they are tried one at a time, and then refused."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from tensorferry.server.processes.running_page import Running

# How long suspects run alone, and hashes of requests are refused: an equal one would end the process again.
REFUSED_SECONDS = 600.0
# The oldest refused hashes are forgotten above this number.
_MOST_REFUSED = 1000
# In the folder that the processes share.
_TRIAL_FILE = "trial"

REFUSED = (
    "this request ended the process that ran it; the same inputs are not run again for "
    f"{REFUSED_SECONDS / 60:g} minutes after that; change the request, or report the model's crash"
)
# Deaths within that time after which a client is refused, and for how long at first; the time doubles.
_MOST_DEATHS = 3
_CLIENT_SECONDS = 60.0
_LONGEST_SECONDS = 3600.0
# An exit or a signal that may have another cause than the request that was tried.
_FROM_ELSEWHERE = (0, signal.SIGKILL)
# A request is refused after this many deaths in its trials: other requests are hardly the cause of all of them.
_TRIALS = 2


@dataclass(frozen=True, slots=True)
class Findings:
    """What follows from the end of a process: for all processes, with hashes in hexadecimal form.

    `suspects` run alone from now on. The request `refused` is not run. `client` names a client and a model: no request of
    that client to that model is run. Both are "" for none. All end at `until`, the client's at `client_until`, on the clock of time.monotonic.
    """

    until: float
    suspects: Sequence[str] = ()
    refused: str = ""
    client: str = ""
    client_until: float = math.inf


@dataclass(slots=True)
class CauseFinder:
    """Finds the requests, and clients, that may have ended a process, by what the pages of ended ones say. Not thread-safe.

    A request that was tried is the cause if nothing else ran, or at the second death in ten minutes. A client is refused
    if its requests ran at three deaths in ten minutes, and no other client's at all three.
    """

    # Of the last deaths: when, and the owners of the requests that ran.
    _deaths: deque[tuple[float, frozenset[bytes]]] = field(default_factory=lambda: deque(maxlen=_MOST_DEATHS))
    # How often each request died in trials, and when for the last time.
    _killed: dict[bytes, tuple[int, float]] = field(default_factory=dict)
    _refusals: Counter[bytes] = field(default_factory=Counter)

    def after(self, running: Sequence[Running], signal_number: int, now: float) -> Findings:
        """Return what follows from the end of a process, with the requests that ran in it.

        `signal_number` is the signal that ended it; 0 if it exited.
        """
        until = now + REFUSED_SECONDS
        client, client_until = self._client(frozenset(one.owner for one in running), now)
        self._killed = {
            digest: (deaths, last)
            for digest, (deaths, last) in self._killed.items()
            if now - last <= REFUSED_SECONDS
        }
        # One at most, since the processes try one at a time.
        for digest in (one.digest for one in running if one.tried):
            deaths = self._killed.get(digest, (0, now))[0] + 1
            self._killed[digest] = deaths, now
            sure = len(running) == 1 and signal_number not in _FROM_ELSEWHERE
            if sure or deaths >= _TRIALS:
                return Findings(until, (), digest.hex(), client.hex(), client_until)
        marks = tuple(dict.fromkeys(one.digest.hex() for one in running if not one.tried))
        return Findings(until, marks, "", client.hex(), client_until)

    def _client(self, owners: frozenset[bytes], now: float) -> tuple[bytes, float]:
        """Note a death; return the owner that is refused, b"" for none, and until when."""
        self._deaths.append((now, owners))
        first, _ = self._deaths[0]
        if len(self._deaths) < _MOST_DEATHS or now - first > REFUSED_SECONDS:
            return b"", math.inf
        common = frozenset.intersection(*(each for _, each in self._deaths))
        # Clients without a name share one owner, so that none of them can be told from the others.
        if len(common) != 1 or not any(owner := next(iter(common))):
            return b"", math.inf
        self._deaths.clear()
        self._refusals[owner] += 1
        seconds = min(_CLIENT_SECONDS * 2 ** (self._refusals[owner] - 1), _LONGEST_SECONDS)
        return owner, now + seconds


class TrialLock:
    """The right to run a suspect, which one of all processes has at a time, and only while all serve. Thread-safe.

    So a request that ends processes ends one at a time, and the others serve. The processes share a file, which is locked
    during a trial, and not empty. The kernel ends the lock of a process that dies, but the content stays until the
    supervisor removes it: by then every process knows what was found. `all_serve` says whether every process serves.
    """

    def __init__(self, folder: Path, all_serve: Callable[[], bool]) -> None:
        self._path = folder / _TRIAL_FILE
        self._path.touch(0o600)
        self._all_serve = all_serve
        # Guards `_changes`. Notified when it grows.
        self._changed = threading.Condition()
        # How often `all_serve` may have changed, or the supervisor may have removed an ended trial.
        self._changes = 0
        # The file during a trial of this process.
        self._locked: BinaryIO | None = None

    def begin(self) -> bool:
        """Return whether the caller may run a suspect now. If so, it calls `end` afterwards."""
        if not self._all_serve():
            return False
        with suppress(OSError), ExitStack() as stack:
            # Opened each time, because a lock belongs to an opened file, and excludes other threads of this process, too.
            file = stack.enter_context(self._path.open("r+b", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(file.fileno()).st_size:
                file.write(b"1")
                self._locked = file
                stack.pop_all()
                return True
        return False

    def processes_changed(self) -> None:
        """Note that `all_serve` may return something else, and that the supervisor may have removed an ended trial."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def await_free(self) -> None:
        """Wait until `begin` may succeed. Another caller may be faster."""
        with self._path.open("rb") as waiting:
            while True:
                with self._changed:
                    changes = self._changes
                fcntl.flock(waiting, fcntl.LOCK_EX)
                # Read during the lock: the content is then of a process that ended, whose trial only the supervisor ends.
                abandoned = os.fstat(waiting.fileno()).st_size > 0
                fcntl.flock(waiting, fcntl.LOCK_UN)
                if not abandoned and self._all_serve():
                    return
                with self._changed:
                    while self._changes == changes:
                        self._changed.wait()

    def end(self) -> None:
        """End the trial, on any thread."""
        assert self._locked is not None
        self._locked.truncate(0)
        self._locked.close()


def end_abandoned_trial(folder: Path) -> None:
    """Permit trials again, after a process ended during one and was replaced. The supervisor calls this."""
    with suppress(FileNotFoundError):
        os.truncate(folder / _TRIAL_FILE, 0)


class RefusedRequests:
    """Hashes of requests that are refused, each until a time of `clock`. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        # Guards writes of _until.
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}

    def add(self, digest: str, until: float) -> None:
        """Refuse a request until this time."""
        with self._lock:
            self._until.pop(digest, None)
            self._until[digest] = until
            if len(self._until) > _MOST_REFUSED:
                del self._until[next(iter(self._until))]

    def __bool__(self) -> bool:
        """Return false if no request is refused: nearly always, so that nothing is hashed."""
        return bool(self._until)

    def has_digest(self, digest: str) -> bool:
        """Return whether the request with this hash is refused."""
        return self._until.get(digest, 0.0) > self._now()
