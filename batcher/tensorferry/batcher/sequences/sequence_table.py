"""The living sequences of one model, and why others have ended. Pure bookkeeping: no lock, no clock, no batcher."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from tensorferry.batcher.errors import QueueFull, SequenceEnded, SequenceNotStarted
from tensorferry.batcher.request import Request, SequenceTag
from tensorferry.batcher.sequences.sequence import (
    Array,
    EndReason,
    SequenceLimits,
    SequenceStatistics,
    state_bytes,
)

# Ended sequences whose reason is known.
_REMEMBERED = 10_000
_RETRY_SECONDS = 1.0

_ENDS = {
    EndReason.ENDED: "has ended with its last request",
    EndReason.IDLE: "ended, because no request came for {idle:g} s",
    EndReason.STREAM: "ended with its stream",
    EndReason.CANCELLED: "ended, because a request was cancelled while it ran",
    EndReason.FAILED: "ended, because a request of it failed",
    EndReason.RESTARTED: "was begun again",
}


@dataclass(slots=True, eq=False)
class Living:
    """A sequence that lives. Only its table changes it, under the lock of the table's caller.

    `states` are None before its first answer and after its end. `busy`: the batcher has a request of it, behind which the
    others wait. `closing`: a request with the flag END was accepted. `doomed` is why it ends when the busy request is done.
    """

    key: tuple[str, object, int | str]
    last_used: float
    states: tuple[Array, ...] | None = None
    nbytes: int = 0
    busy: bool = False
    closing: bool = False
    doomed: EndReason | None = None
    waiting: deque[Request] = field(default_factory=deque)


class SequenceTable:
    """The sequences of the model `name`. The caller's lock guards it."""

    def __init__(
        self, name: str, initial_bytes: int, limits: SequenceLimits, max_waiting: int, max_waiting_bytes: int
    ) -> None:
        self._name = name
        self._initial_bytes = initial_bytes
        self._limits = limits
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        # In the order of their last use.
        self._living: OrderedDict[Hashable, Living] = OrderedDict()
        self._of_stream: dict[object, set[Hashable]] = {}
        self._ended: OrderedDict[Hashable, EndReason] = OrderedDict()
        self._counts: Counter[EndReason] = Counter()
        self._started = 0
        self._bytes = 0
        # Requests that wait for the one before them.
        self.waiting = 0
        self._waiting_bytes = 0

    def admit(self, request: Request, tag: SequenceTag, now: float) -> Living | None:
        """Accept a request. Return its sequence if it runs now, None if it waits for those before it.

        Raises SequenceNotStarted, SequenceEnded or QueueFull.
        """
        assert tag.id is not None
        self.expire(now)
        key = (tag.owner, tag.stream, tag.id)
        living = self._living.get(key)
        if not tag.start and (living is None or living.closing or living.doomed is not None):
            raise self._refusal(key, tag.id, living)
        if living is None:
            living = self._new(key, now)
        elif living.busy:
            if (
                self.waiting >= self._max_waiting
                or self._waiting_bytes + request.nbytes > self._max_waiting_bytes
            ):
                raise QueueFull(
                    f"{self.waiting} requests of sequences of model {self._name!r} wait for those before them, with "
                    f"{self._waiting_bytes} bytes, as many as may",
                    _RETRY_SECONDS,
                )
            living.waiting.append(request)
            self._count_waiting(request, 1)
            living.closing = tag.end
            return None
        living.busy = True
        living.closing = tag.end
        self._living.move_to_end(key)
        return living

    def _new(self, key: tuple[str, object, int | str], now: float) -> Living:
        limits = self._limits
        if len(self._living) >= limits.sequences:
            raise QueueFull(
                f"{len(self._living)} sequences of model {self._name!r} live, as many as may; end some, or start the server with "
                "a larger --max-sequences",
                _RETRY_SECONDS,
            )
        if self._bytes + self._initial_bytes > limits.state_bytes:
            raise QueueFull(
                f"the states of the sequences of model {self._name!r} have {self._bytes} bytes, of at most "
                f"{limits.state_bytes}; end some, or start the server with a larger --max-state-bytes",
                _RETRY_SECONDS,
            )
        living = self._living[key] = Living(key, now)
        self._ended.pop(key, None)
        if key[1] is not None:
            self._of_stream.setdefault(key[1], set()).add(key)
        self._set_bytes(living, self._initial_bytes)
        return living

    def _refusal(self, key: Hashable, number: int | str, living: Living | None) -> Exception:
        reason = EndReason.ENDED if living is not None and living.closing else None
        reason = reason or (living.doomed if living is not None else self._ended.get(key))
        if reason is None:
            # In Triton's words.
            return SequenceNotStarted(
                f"inference request for sequence {number} to model {self._name!r} must specify the START flag on the first "
                "request of the sequence"
            )
        how = _ENDS[reason].format(idle=self._limits.idle_seconds)
        return SequenceEnded(
            f"sequence {number} of model {self._name!r} {how}; begin it again with sequence_start"
        )

    def refusal_of(self, tag: SequenceTag) -> Exception:
        """Return why a request cannot go on with its sequence, which has ended."""
        assert tag.id is not None
        return self._refusal((tag.owner, tag.stream, tag.id), tag.id, None)

    def refused(self, living: Living) -> tuple[Request | None, Sequence[Request]]:
        """Note that the batcher did not accept a request, which changes nothing. Return as `next_after` does."""
        living.closing = False
        return self.next_after(living)

    def answered(
        self, living: Living, tag: SequenceTag, states: tuple[Array, ...], now: float
    ) -> tuple[Request | None, Sequence[Request]]:
        """Take over the states of an answered request. Return as `next_after` does."""
        self._count_start(living, tag)
        living.states, living.last_used = states, now
        self._set_bytes(living, state_bytes(states))
        self._living.move_to_end(living.key)
        reason = EndReason.ENDED if tag.end else living.doomed
        if reason is not None:
            self._end(living, reason)
        return self.next_after(living)

    def failed(
        self, living: Living, tag: SequenceTag, reason: EndReason
    ) -> tuple[Request | None, Sequence[Request]]:
        """End a sequence whose request failed. Return as `next_after` does."""
        self._count_start(living, tag)
        self._end(living, living.doomed or reason)
        return self.next_after(living)

    def next_after(self, living: Living) -> tuple[Request | None, Sequence[Request]]:
        """Return the next request of a sequence, which runs now, and those before it that its end makes impossible."""
        lost: list[Request] = []
        while living.waiting:
            request = living.waiting.popleft()
            self._count_waiting(request, -1)
            tag = request.sequence
            if tag is not None and (tag.start or living.states is not None):
                return request, lost
            lost.append(request)
        living.busy = False
        if living.states is None:
            self._forget(living)
        return None, lost

    def _count_start(self, living: Living, tag: SequenceTag) -> None:
        if tag.start:
            self._started += 1
            if living.states is not None:
                self._counts[EndReason.RESTARTED] += 1

    def _end(self, living: Living, reason: EndReason) -> None:
        living.states, living.doomed = None, None
        self._counts[reason] += 1
        self._ended[living.key] = reason
        self._ended.move_to_end(living.key)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _forget(self, living: Living) -> None:
        self._set_bytes(living, 0)
        del self._living[living.key]
        keys = self._of_stream.get(living.key[1])
        if keys is not None:
            keys.discard(living.key)
            if not keys:
                del self._of_stream[living.key[1]]

    def _set_bytes(self, living: Living, nbytes: int) -> None:
        self._bytes += nbytes - living.nbytes
        living.nbytes = nbytes

    def withdraw(self, request: Request, tag: SequenceTag) -> bool:
        """Take a request that waits out of its sequence; return false if it does not wait."""
        living = self._living.get((tag.owner, tag.stream, tag.id))
        if living is None or request not in living.waiting:
            return False
        living.waiting.remove(request)
        self._count_waiting(request, -1)
        return True

    def _count_waiting(self, request: Request, count: int) -> None:
        self.waiting += count
        self._waiting_bytes += count * request.nbytes

    def expire(self, now: float) -> float:
        """End the sequences that are idle for too long. Return when to look again."""
        idle, until = self._limits.idle_seconds, now + self._limits.idle_seconds
        ended = []
        for living in self._living.values():
            if living.busy:
                continue
            if living.last_used + idle > now:
                until = living.last_used + idle
                break
            ended.append(living)
        for living in ended:
            self._end(living, EndReason.IDLE)
            self._forget(living)
        return until

    def lives(self, tag: SequenceTag) -> bool:
        """Return whether a request of this sequence would go on with it."""
        living = self._living.get((tag.owner, tag.stream, tag.id))
        return living is not None and not living.closing and living.doomed is None

    def end(self, tag: SequenceTag) -> None:
        """End a sequence because it is begun again elsewhere; with its request, if the batcher has one."""
        living = self._living.get((tag.owner, tag.stream, tag.id))
        if living is not None:
            self._doom(living, EndReason.RESTARTED)

    def _doom(self, living: Living, reason: EndReason) -> None:
        if living.busy:
            living.doomed = reason
        else:
            self._end(living, reason)
            self._forget(living)

    def end_stream(self, stream: object) -> None:
        """End the sequences of a stream that is over; those with a request in the batcher end with it."""
        for key in list(self._of_stream.get(stream, ())):
            self._doom(self._living[key], EndReason.STREAM)

    def statistics(self) -> SequenceStatistics:
        """Return counts since the start, and current sizes."""
        return SequenceStatistics(
            len(self._living), self.waiting, self._bytes, self._started, dict(self._counts)
        )
