"""Options of coalescing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages.arguments import integer, shown

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Coalesce:
    """Bounds on messages that carry the calls of several callers.

    A message has at most `max_rows` rows (None: the model's largest batch) and about `max_bytes`
    bytes. A call waits at most `max_wait` seconds for others, and only while another message of the
    same kind is in flight.

    >>> with InferenceClient("127.0.0.1:8001", coalesce=Coalesce(max_rows=16)) as other:
    ...     other.infer("digits", {"image": np.zeros((2, 8, 8), np.uint8)})["probabilities"].shape
    (2, 10)
    """

    max_rows: int | None = None
    max_bytes: int = 1 << 20
    max_wait: float = 0.001

    def __post_init__(self) -> None:
        if self.max_rows is not None:
            integer("max_rows", self.max_rows, 1, _MOST)
        integer("max_bytes", self.max_bytes, 1, _MOST)
        wait = self.max_wait
        if isinstance(wait, bool) or not isinstance(wait, (int, float)) or not 0 <= wait < math.inf:
            raise InvalidInput(
                "max_wait", "a number of seconds, 0 or more", shown(wait), "give one, such as 0.001"
            )


def coalesce_of(coalesce: object, *, check: bool) -> Coalesce | None:
    """Check the caller's argument; None means that every call is a message of its own."""
    if coalesce is False or coalesce is None:
        return None
    if coalesce is not True and not isinstance(coalesce, Coalesce):
        raise InvalidInput(
            "coalesce", "True, False or a Coalesce", shown(coalesce), "write coalesce=True, or leave it out"
        )
    if not check:
        raise InvalidInput(
            "coalesce",
            "a client that checks requests",
            "check=False",
            "leave out check=False: the model's metadata says which requests may be joined",
        )
    return Coalesce() if coalesce is True else coalesce
