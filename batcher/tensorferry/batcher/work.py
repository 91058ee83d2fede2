"""What the queue hands to a worker, and when that ran it."""

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


class Times(NamedTuple):
    """When a batch began to be joined and was ready for the device, when that started on it, and had run it.

    `done` gets the one moment that is known only after the answers: when all are handed out.
    """

    begun: float
    ready: float
    started: float
    ended: float
    done: list[float]
