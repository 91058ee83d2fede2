"""What the server as a whole has to tell, beside what its models' batchers count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """Of this moment.

    `refused` says how many requests got which code before they reached a model's queue, `transport` what serves
    the two methods of inference, `unsent_bytes` how many bytes of answers clients have yet to read. `call_threads` are those in the pools for calls: made as calls need them, they stay.
    """

    release: str
    transport: str
    ready: bool
    open_streams: int = 0
    call_threads: int = 0
    unsent_bytes: int = 0
    refused: Mapping[grpc.StatusCode, int] = field(default_factory=dict)
