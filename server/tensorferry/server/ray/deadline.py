"""How a call's deadline gets from Ray's proxy to a replica: in the metadata, which is all that Ray hands on.

The two may be on different machines, whose clocks need not agree. So it is told how much time was left as the proxy
took the call, which is too much by as long as it takes to the replica, and waits for one that has room; the proxy ends
the call in time all the same. On the proxy's own machine the two have one clock, and what it told is exact.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from tensorferry.server.identity import Metadata

# The proxy's own comes last, and counts.
DEADLINE = "tensorferry-deadline"
_NO_CLOCK = "none"


def _clock() -> str:
    """Whose `time.monotonic` is that of this process: it counts from the machine's start, in each of its time namespaces."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:
        return _NO_CLOCK


CLOCK = _clock()


def told(remaining: float) -> str:
    """What the metadata says of a call that has so many seconds left now."""
    return f"{remaining!r} {time.monotonic() + remaining!r} {CLOCK}"


def deadline_of(metadata: Metadata) -> float:
    """The deadline in a call's metadata, on the clock of `time.monotonic`; inf for none."""
    given = [value for name, value in metadata if name == DEADLINE]
    if not given:
        return math.inf
    try:
        remaining, at, clock = str(given[-1]).split(" ")
        return float(at) if clock == CLOCK != _NO_CLOCK else time.monotonic() + float(remaining)
    except ValueError:
        return math.inf
