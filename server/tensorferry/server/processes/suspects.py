"""Requests that may have ended a server process, by what the pages of ended processes say."""

from __future__ import annotations

import math
import signal
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tensorferry.server.processes.running_page import Running

# How long suspects run alone, and digests are refused.
SUSPECT_SECONDS = 600.0
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

    `suspects` run alone from now on. `refused` is a request that is never run, and `client` a client and model of which none
    is; "" for none. All end at `until`, the client's at `client_until`, on the clock of time.monotonic.
    """

    until: float
    suspects: Sequence[str] = ()
    refused: str = ""
    client: str = ""
    client_until: float = math.inf


@dataclass(slots=True)
class Suspects:
    """What was found in the last minutes. Not thread-safe.

    A request that was tried is the cause if nothing else ran, or at the second death. A client is refused
    if its requests ran at three deaths in ten minutes, and no other client's at all three.
    """

    # Of the last deaths: when, and the owners of the requests that ran.
    _deaths: deque[tuple[float, frozenset[bytes]]] = field(default_factory=lambda: deque(maxlen=_MOST_DEATHS))
    _killed: Counter[bytes] = field(default_factory=Counter)
    _refusals: Counter[bytes] = field(default_factory=Counter)

    def after(self, running: Sequence[Running], signal_number: int, now: float) -> Findings:
        """Return what follows from the end of a process, with the requests that ran in it.

        `signal_number` is the signal that ended it; 0 if it exited.
        """
        until = now + SUSPECT_SECONDS
        client, client_until = self._client(frozenset(one.owner for one in running), now)
        # One at most, since the processes try one at a time.
        for digest in (one.digest for one in running if one.tried):
            self._killed[digest] += 1
            sure = len(running) == 1 and signal_number not in _FROM_ELSEWHERE
            if sure or self._killed[digest] >= _TRIALS:
                return Findings(until, (), digest.hex(), client.hex(), client_until)
        marks = tuple(dict.fromkeys(one.digest.hex() for one in running if not one.tried))
        return Findings(until, marks, "", client.hex(), client_until)

    def _client(self, owners: frozenset[bytes], now: float) -> tuple[bytes, float]:
        """Note a death; return the owner that is refused, b"" for none, and until when."""
        self._deaths.append((now, owners))
        first, _ = self._deaths[0]
        if len(self._deaths) < _MOST_DEATHS or now - first > SUSPECT_SECONDS:
            return b"", math.inf
        common = frozenset.intersection(*(each for _, each in self._deaths))
        # Clients without a name share one owner, so that none of them can be told from the others.
        if len(common) != 1 or not any(owner := next(iter(common))):
            return b"", math.inf
        self._deaths.clear()
        self._refusals[owner] += 1
        seconds = min(_CLIENT_SECONDS * 2 ** (self._refusals[owner] - 1), _LONGEST_SECONDS)
        return owner, now + seconds
