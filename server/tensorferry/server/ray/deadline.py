"""Deadlines of calls from Ray's proxy to a replica, in the metadata, because Ray passes on nothing else.

Proxy and replica can run on different machines, whose clocks differ. The metadata therefore has the time that remained when
the proxy received the call. That is too much by the time until the replica gets the call, but the proxy itself ends the call
at its deadline. If both run on one machine they share a clock, and the deadline is exact.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from tensorferry.server.identity import Metadata
from tensorferry.server.transport.call_admission import deadline_after

# The metadata key. The last value counts, because it is the proxy's.
DEADLINE = "tensorferry-deadline"
_NO_CLOCK = "none"


def _clock() -> str:
    """Return an identifier of the clock behind `time.monotonic`: the boot of the machine and the time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:
        return _NO_CLOCK


CLOCK = _clock()


def encode_deadline(remaining: float) -> str:
    """Return the metadata value of a call that has this many seconds left."""
    return f"{remaining!r} {time.monotonic() + remaining!r} {CLOCK}"


def decode_deadline(metadata: Metadata) -> float:
    """Return the deadline in a call's metadata, as a time of `time.monotonic`; inf if there is none."""
    values = [value for name, value in metadata if name == DEADLINE]
    if not values:
        return math.inf
    try:
        remaining, at, clock = str(values[-1]).split(" ")
        return float(at) if clock == CLOCK != _NO_CLOCK else deadline_after(float(remaining))
    except ValueError:
        return math.inf
