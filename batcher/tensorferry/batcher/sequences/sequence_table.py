"""The living sequences of one model, and why others have ended. Pure bookkeeping: no lock, no clock, no batcher."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from tensorferry.batcher.errors import QueueFull, SequenceEnded, SequenceNotStarted
from tensorferry.batcher.request import Request, SequenceTag
from tensorferry.batcher.sequences.sequence import (
    EndReason,
    SequenceLimits,
    SequenceStatistics,
    State,
    state_bytes,
)

# Ended sequences whose reason is known.
_REMEMBERED = 10_000
_RETRY_SECONDS = 1.0
# Deadlines that pass within this time of each other may be seen together.
_LOOK_SECONDS = 0.01

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
    """A sequence that lives, or has requests. Only its table changes it, under the lock of the table's caller.

    `states` are None before its first answer and after its end. `running` is what the request says that the batcher has,
    behind which the others wait. `doomed` is why it ends when that request is done, and again after a start that waits.
    `waiting` also keeps the places of requests whose deadline has passed: the sequence ends there.
    """

    key: tuple[str, object, int | str]
    last_used: float
    states: tuple[State, ...] | None = None
    nbytes: int = 0
    running: SequenceTag | None = None
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
        # Requests that wait for the one before them, and their sequences.
        self.waiting: dict[Request, Living] = {}
        self._waiting_bytes = 0
        # How many requests `waiting` of all sequences has.
        self._places = 0

    def admit(self, request: Request, tag: SequenceTag, now: float) -> Living | None:
        """Accept a request. Return its sequence if it runs now, None if it waits for those before it.

        Raises SequenceNotStarted, SequenceEnded or QueueFull.
        """
        assert tag.id is not None
        self.expire(now)
        key = (tag.owner, tag.stream, tag.id)
        living = self._living.get(key)
        over = self._ended.get(key) if living is None else self._over(living)
        if not tag.start and (living is None or over is not None):
            raise self._refusal(tag.id, over)
        if living is None:
            living = self._new(key, now)
        elif living.running is not None:
            if (
                self._places >= self._max_waiting
                or self._waiting_bytes + request.nbytes > self._max_waiting_bytes
            ):
                raise QueueFull(
                    f"{self._places} requests of sequences of model {self._name!r} wait for those before them, with "
                    f"{self._waiting_bytes} bytes, as many as may",
                    _RETRY_SECONDS,
                )
            living.waiting.append(request)
            self._places += 1
            self.waiting[request] = living
            self._waiting_bytes += request.nbytes
            return None
        living.running = tag
        self._living.move_to_end(key)
        return living

    def _over(self, living: Living) -> EndReason | None:
        """Return why a further request cannot go on with a sequence; None if it can."""
        if living.doomed is not None:
            return living.doomed
        last = living.running
        if living.waiting:
            request = living.waiting[-1]
            if request not in self.waiting:
                return EndReason.FAILED
            last = request.sequence
        return EndReason.ENDED if last is not None and last.end else None

    def _new(self, key: tuple[str, object, int | str], now: float) -> Living:
        limits = self._limits
        if len(self._living) >= limits.sequences:
            raise QueueFull(
                f"{len(self._living)} sequences of model {self._name!r} live, as many as may; end some, or start the server with "
                "a larger --max-sequences",
                _RETRY_SECONDS,
            )
        if (full := self._no_room(self._initial_bytes)) is not None:
            raise full
        living = self._living[key] = Living(key, now)
        self._ended.pop(key, None)
        if key[1] is not None:
            self._of_stream.setdefault(key[1], set()).add(key)
        self._set_bytes(living, self._initial_bytes)
        return living

    def _no_room(self, nbytes: int) -> QueueFull | None:
        """Return why there is no room for so many more bytes of states; None if there is."""
        limit = self._limits.state_bytes
        if self._bytes + nbytes <= limit:
            return None
        return QueueFull(
            f"the states of the sequences of model {self._name!r} have {self._bytes} bytes, of at most {limit}, and {nbytes} "
            "more are needed; end some, or start the server with a larger --max-state-bytes",
            _RETRY_SECONDS,
        )

    def no_room_for(self, living: Living, tag: SequenceTag, states: tuple[State, ...]) -> QueueFull | None:
        """Return why there is no room for the states of an answered request; None if there is, or if none is needed."""
        growth = state_bytes(states) - living.nbytes
        if growth <= 0 or tag.end or living.doomed is not None:
            return None
        return self._no_room(growth)

    def _refusal(self, number: int | str | None, reason: EndReason | None) -> Exception:
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

    def answered(self, living: Living, tag: SequenceTag, states: tuple[State, ...], now: float) -> None:
        """Take over the states of an answered request. `next_after` follows."""
        self._count_start(living, tag)
        living.states, living.last_used = states, now
        self._set_bytes(living, state_bytes(states))
        self._living.move_to_end(living.key)
        reason = EndReason.ENDED if tag.end else living.doomed
        if reason is not None:
            self._end(living, reason)

    def failed(self, living: Living, tag: SequenceTag, reason: EndReason) -> None:
        """End a sequence whose request failed. `next_after` follows."""
        self._count_start(living, tag)
        self._end(living, living.doomed or reason)

    def next_after(self, living: Living) -> tuple[Request | None, Sequence[tuple[Request, Exception]]]:
        """Return the request of a sequence that runs now, because the batcher has none any more; None if none waits.

        Also return the requests before it, which the end of the sequence makes impossible, with their errors.
        """
        if living.doomed is not None and living.states is not None:
            self._end(living, living.doomed)
        lost: list[tuple[Request, Exception]] = []
        while living.waiting:
            request = living.waiting.popleft()
            self._places -= 1
            tag = request.sequence
            assert tag is not None
            if self._waits_no_more(request) is None:
                if living.states is not None:
                    self._end(living, EndReason.FAILED)
            elif tag.start or living.states is not None:
                living.running = tag
                return request, lost
            else:
                lost.append((request, self._refusal(tag.id, self._ended.get(living.key))))
        living.running = None
        if living.states is None:
            self._forget(living)
        return None, lost

    def _count_start(self, living: Living, tag: SequenceTag) -> None:
        if tag.start:
            self._started += 1
            if living.states is not None:
                self._counts[EndReason.RESTARTED] += 1

    def _end(self, living: Living, reason: EndReason) -> None:
        living.states = None
        self._counts[reason] += 1
        self._ended[living.key] = reason
        self._ended.move_to_end(living.key)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        if not living.waiting:
            self._forget(living)

    def _forget(self, living: Living) -> None:
        """Remove a sequence that has ended, unless that was done."""
        if self._living.get(living.key) is not living:
            return
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

    def withdraw(self, request: Request, *, ends: bool) -> bool:
        """Let a request wait no more, which ends its sequence in its place if `ends`; return false if it does not wait."""
        living = self._waits_no_more(request)
        if living is not None and not ends:
            living.waiting.remove(request)
            self._places -= 1
        return living is not None

    def _waits_no_more(self, request: Request) -> Living | None:
        """Forget that a request waits, and return its sequence; None if it does not wait."""
        living = self.waiting.pop(request, None)
        if living is not None:
            self._waiting_bytes -= request.nbytes
        return living

    def overdue(self, now: float) -> tuple[Sequence[Request], float]:
        """Withdraw the waiting requests whose deadline has passed. Return them, and when to look again."""
        late = [request for request in self.waiting if not request.deadline > now]
        for request in late:
            self.withdraw(request, ends=True)
        due = min([request.deadline for request in self.waiting], default=math.inf)
        return late, max(due, now + _LOOK_SECONDS)

    def expire(self, now: float) -> float:
        """End the sequences that are idle for too long. Return when to look again."""
        idle, until = self._limits.idle_seconds, now + self._limits.idle_seconds
        ended = []
        for living in self._living.values():
            if living.running is not None:
                continue
            if living.last_used + idle > now:
                until = living.last_used + idle
                break
            ended.append(living)
        for living in ended:
            self._end(living, EndReason.IDLE)
        return until

    def knows(self, tag: SequenceTag) -> bool:
        """Return whether a sequence lives, or why it ended is known and it was not begun again elsewhere."""
        key = (tag.owner, tag.stream, tag.id)
        living = self._living.get(key)
        reason = self._ended.get(key) if living is None else living.doomed
        return reason is not EndReason.RESTARTED and (living is not None or reason is not None)

    def end(self, tag: SequenceTag) -> None:
        """End a sequence because it is begun again elsewhere; with its request, if the batcher has one."""
        key = (tag.owner, tag.stream, tag.id)
        self._ended.pop(key, None)
        if (living := self._living.get(key)) is not None:
            self._doom(living, EndReason.RESTARTED)

    def _doom(self, living: Living, reason: EndReason) -> None:
        if living.running is not None:
            living.doomed = reason
        else:
            self._end(living, reason)

    def end_stream(self, stream: object) -> None:
        """End the sequences of a stream that is over; those with a request in the batcher end with it."""
        for key in list(self._of_stream.get(stream, ())):
            self._doom(self._living[key], EndReason.STREAM)

    def statistics(self) -> SequenceStatistics:
        """Return counts since the start, and current sizes."""
        return SequenceStatistics(
            len(self._living), len(self.waiting), self._bytes, self._started, dict(self._counts)
        )
