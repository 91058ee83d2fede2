"""What the queue hands to a worker, and when that ran it."""

from __future__ import annotations

from typing import NamedTuple

from tensorferry.batcher.policy.close_rule import CloseReason
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


def in_vain(predicted: float, latest: float, begun: float, ready: float, now: float) -> bool:
    """Whether a batch whose turn on the device is now would be answered after the latest of its deadlines.

    Only if it would have been in time when it left, begun to be joined at `begun` and ready at `ready`, had the
    device run the one before it as fast as it should: what is wrong about the batch itself only a run can tell.
    """
    return begun + predicted < latest <= now + predicted - (ready - begun)


class Times(NamedTuple):
    """When a batch began to be joined and was ready for the device, when that started on it, and had run it.

    `done` gets the one moment that is known only after the answers: when all are handed out.
    """

    begun: float
    ready: float
    started: float
    ended: float
    done: list[float]
