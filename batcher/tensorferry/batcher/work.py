"""What the queue hands to a worker, and what that hands on."""

from __future__ import annotations

from typing import NamedTuple

from tensorferry.batcher.policy import CloseReason
from tensorferry.batcher.request import Request


class Work(NamedTuple):
    """What a worker has to do: complete the expired and the shed, run the batch (which may be empty).

    The expired could not make their deadlines any more; the shed were dropped so that others
    can. `predicted` is how long the batch should take until it is answered, in seconds; 0 when
    nothing is known.
    """

    batch: tuple[Request, ...]
    reason: CloseReason | None
    expired: tuple[Request, ...]
    shed: tuple[Request, ...] = ()
    predicted: float = 0.0


class Ran(NamedTuple):
    """A batch, or a part of one that failed, that has run: its requests and rows, and when.

    `begun` is when it began to be joined, `joined` when that was done; the device ran it from
    `started` to `ended`, all on the batcher's clock. `left` is why it left, None for a part, as which
    it did not leave by itself; `reason` is that of the batch it was a part of. The rest is as in
    `BatchInfo`.
    """

    requests: int
    rows: int
    begun: float
    joined: float
    started: float
    ended: float
    left: CloseReason | None
    reason: CloseReason | None
    predicted: float
    padded_length: int | None
