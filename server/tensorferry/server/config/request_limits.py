"""Limits that the operator sets on one inference request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """`rows` of a request (0: as many as the queue holds); of each tensor of strings how many, and their length in bytes.

    `message_bytes` is the most of a message, once it is unpacked.
    """

    rows: int = 0
    strings: int = 1 << 16
    string_bytes: int = 16 << 20
    message_bytes: int = 64 << 20
