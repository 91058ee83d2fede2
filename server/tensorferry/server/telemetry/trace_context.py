"""Where a call stands in its caller's trace: W3C Trace Context, read from the call's metadata."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

# Version, trace id, span id, flags; a version after 00 may have more behind them.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SAMPLED = 1

# As much as anybody must pass on; what is longer is dropped, as a whole.
_MOST_STATE = 512


class TraceContext(NamedTuple):
    """A span somewhere else, by its ids in hexadecimal digits: nothing else of it can be in a log line.

    `sampled` says that its caller records it. `state` is `tracestate`, which is the tracing systems' own.
    """

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The text that stands for it in metadata."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def parse_trace_context(metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
    """What a call's metadata says of its caller's span; None where that is nothing, or malformed.

    A client may send anything, so what is malformed is no error: the call is then as one without.
    """
    parent: str | bytes | None = None
    state = ""
    for name, value in metadata:
        if name == TRACEPARENT:
            if parent is not None:
                # Two cannot both be right.
                return None
            parent = value
        elif name == TRACESTATE:
            state = f"{state},{value!s}" if state else str(value)
    return None if parent is None else _parsed(str(parent), state)


def _parsed(parent: str, state: str) -> TraceContext | None:
    match = _TRACEPARENT.fullmatch(parent)
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    sampled = bool(int(flags, 16) & _SAMPLED)
    return TraceContext(trace_id, span_id, sampled, state if len(state) <= _MOST_STATE else "")
