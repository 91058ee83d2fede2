"""The batcher of a model that hands on state: at most one request of a sequence runs, and batches hold many sequences."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tensorferry.batcher.batcher import Batcher
from tensorferry.batcher.errors import BatcherClosed, Cancelled, InvalidRequest
from tensorferry.batcher.execution.collate import tensor_of
from tensorferry.batcher.execution.completion import already_completed, withdrawn
from tensorferry.batcher.request import Outcome, Request, SequenceTag
from tensorferry.batcher.sequences.sequence import (
    Array,
    ControlTensor,
    EndReason,
    SequenceLimits,
    SequenceStatistics,
    StateTensor,
    copy_of,
    state_bytes,
)
from tensorferry.batcher.sequences.sequence_table import Living, SequenceTable

_After = tuple[Request | None, Sequence[Request]]

_ALONE = SequenceTag(None, start=True, end=True)


class StatefulBatcher(Batcher):
    """A `Batcher` whose requests of one row belong to sequences. Every method is thread-safe.

    Sequences
        A request names its sequence by its `sequence`; without one, or without an id, it is a sequence by itself. The
        requests of a sequence run one after the other, in the order of `enqueue`. Each gets the `states` that the one before
        handed on, the first one the initial states. Requests of different sequences share batches as usual. The function gets
        the states as inputs beside those of the request, and gives them as outputs, which callers do not get unless
        they want them.

    Ends
        A sequence ends with a request that says so, after `SequenceLimits.idle_seconds` without a request, with its stream
        (`end_stream`), if a request is cancelled that has begun, or if one fails for any reason. Its state is freed at once.
        A further request is refused with SequenceEnded, or with SequenceNotStarted if nothing is known of the sequence. A
        request that is refused by `enqueue`, or cancelled before it has begun, changes nothing.

    Bounds
        A start above the bounds of living sequences or of bytes of state is refused with QueueFull. No sequence is ended
        for another.

    `controls` are further inputs of the function, which tell it of a request's place in its sequence. Other arguments are those of `Batcher`. States are of fixed datatypes; their shape may change from request to request.
    """

    def __init__(
        self,
        model_fn: Any,
        states: Sequence[StateTensor],
        *,
        controls: Sequence[ControlTensor] = (),
        limits: SequenceLimits = SequenceLimits(),  # noqa: B008  (it is frozen)
        **options: Any,
    ) -> None:
        super().__init__(model_fn, **options)
        self._states = tuple(states)
        self._controls = tuple(controls)
        self._initial = tuple(state.initial for state in states)
        self._state_outputs = frozenset(state.output for state in states)
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        settings = self._settings
        self._table = SequenceTable(
            self._name,
            state_bytes(self._initial),
            limits,
            settings.max_queue_size,
            settings.max_queue_bytes,
        )
        # Guards the table, `_closing` and `_beginning`. While it is held, no request is enqueued or completed.
        self._sequences_lock = threading.Lock()
        # Notified when a request no longer waits for the one before it.
        self._waiting_changed = threading.Condition(self._sequences_lock)
        # Notified once `_closing` is set.
        self._closed = threading.Condition(self._sequences_lock)
        self._closing = False
        # Requests that have waited, and that the batcher does not have yet.
        self._beginning = 0
        self._reaper = threading.Thread(target=self._reap, name=f"{self._name}-sequences", daemon=True)
        self._reaper.start()

    @property
    def states(self) -> Mapping[str, str]:
        """The outputs that are handed on, by their inputs."""
        return {state.input: state.output for state in self._states}

    # Requests.

    def enqueue(self, request: Request, *, notify: bool = True, skip_admission: bool = False) -> bool:
        """Accept a request of a sequence; see `Batcher.enqueue`. Also raises SequenceNotStarted and SequenceEnded."""
        if request.rows != 1:
            raise self._rejected(
                request,
                InvalidRequest(
                    f"inference request to model {self._name!r} must specify batch-size 1 due to requirements of sequence "
                    f"batcher; the request has {request.rows} rows"
                ),
            )
        tag = request.sequence or _ALONE
        if tag.id is None:
            tag = tag._replace(start=True, end=True)
            return self._enter(request, tag, self._initial, self._alone(request, tag), notify, skip_admission)
        with self._sequences_lock:
            if self._closing:
                raise self._rejected(request, BatcherClosed("the batcher is closed; it accepts no requests"))
            try:
                living = self._table.admit(request, tag, self._clock.now())
            except Exception as error:
                raise self._rejected(request, error) from None  # type: ignore[arg-type]
        if living is None:
            return False
        try:
            return self._begin(living, request, tag, notify=notify, skip_admission=skip_admission)
        except BaseException:
            with self._sequences_lock:
                after = self._beginning_locked(self._table.refused(living))
            self._go_on(living, *after)
            raise

    def _begin(
        self, living: Living, request: Request, tag: SequenceTag, *, notify: bool, skip_admission: bool
    ) -> bool:
        """Enqueue a request of a sequence that has no other in the batcher."""
        states = self._initial if tag.start or living.states is None else living.states
        complete = partial(self._completed, living, request, tag, request.complete)
        return self._enter(request, tag, states, complete, notify, skip_admission)

    def _enter(
        self,
        request: Request,
        tag: SequenceTag,
        states: tuple[Array, ...],
        complete: Callable[[Outcome], None],
        notify: bool,
        skip_admission: bool,
    ) -> bool:
        """Enqueue a request with its states. The request is unchanged if it is refused."""
        before = (
            request.tensors,
            request.names,
            request.nbytes,
            request.key,
            request.padding,
            request.complete,
        )
        try:
            controls = [control.value(tag) for control in self._controls]
        except ValueError as error:
            raise self._rejected(request, InvalidRequest(str(error))) from None
        tensors = tuple(map(tensor_of, (*states, *controls)))
        request.tensors += tensors
        request.names = self._names_with_states(request.names)
        request.nbytes += state_bytes(states)
        if any(state.shape != initial.shape for state, initial in zip(states, self._initial, strict=True)):
            # States of other shapes cannot be joined with those of others.
            request.key = (request.key, tuple(state.shape for state in states))
        if request.padding is not None:
            plan = request.padding
            shapes = (*plan.shapes, *(tensor.shape[1:] for tensor in tensors))
            request.padding = plan._replace(shapes=shapes, pads=(*plan.pads, *[None] * len(tensors)))
        request.complete = complete
        try:
            return super().enqueue(request, notify=notify, skip_admission=skip_admission)
        except BaseException:
            tensors, names, nbytes, key, padding, whole = before
            request.tensors, request.names, request.nbytes, request.key = tensors, names, nbytes, key
            request.padding, request.complete = padding, whole
            raise

    def _names_with_states(self, names: tuple[str, ...] | None) -> tuple[str, ...]:
        if names is None:
            raise InvalidRequest("the input is one bare array; a model with states takes inputs by name")
        # The same object each time, because the queue and the join compare names by identity first.
        found = self._names.get(names)
        if found is None:
            added = [state.input for state in self._states] + [control.input for control in self._controls]
            found = self._names[names] = (*names, *added)
        return found

    # Completions.

    def _alone(self, request: Request, tag: SequenceTag) -> Callable[[Outcome], None]:
        complete = request.complete
        return lambda outcome: complete(self._without_states(outcome, tag))

    def _completed(
        self,
        living: Living,
        request: Request,
        tag: SequenceTag,
        complete: Callable[[Outcome], None],
        outcome: Outcome,
    ) -> None:
        """Take over the states of an outcome, let the next request of the sequence run, and complete this one."""
        states: tuple[Array, ...] = ()
        if outcome.error is None:
            try:
                states = tuple(copy_of(outcome.outputs[state.output], state) for state in self._states)
            except Exception as error:
                outcome = outcome._replace(outputs=None, error=error)
        outcome = self._without_states(outcome, tag)
        with self._sequences_lock:
            if outcome.error is None:
                found = self._table.answered(living, tag, states, self._clock.now())
            elif isinstance(outcome.error, Cancelled) and math.isnan(request.started):
                found = self._table.refused(living)
            else:
                reason = EndReason.CANCELLED if isinstance(outcome.error, Cancelled) else EndReason.FAILED
                found = self._table.failed(living, tag, reason)
            after = self._beginning_locked(found)
        self._go_on(living, *after)
        complete(outcome)

    def _without_states(self, outcome: Outcome, tag: SequenceTag) -> Outcome:
        if outcome.outputs is None:
            return outcome
        hidden = self._state_outputs - tag.wanted
        return outcome._replace(
            outputs={name: value for name, value in outcome.outputs.items() if name not in hidden}
        )

    def _go_on(self, living: Living, following: Request | None, lost: Sequence[Request]) -> None:
        """Enqueue the next request of a sequence, and fail those before it, whose sequence has ended."""
        while True:
            for request in lost:
                with self._sequences_lock:
                    error = self._table.refusal_of(request.sequence or _ALONE)
                self._fail_waiting(request, error)
            if following is None:
                return
            tag = following.sequence or _ALONE
            try:
                # It was accepted, so the bounds of the queue do not hold for it any more.
                self._begin(living, following, tag, notify=True, skip_admission=True)
                return
            except Exception as refusal:
                self._fail_waiting(following, refusal)
                with self._sequences_lock:
                    found = self._table.failed(living, tag, EndReason.FAILED)
                    following, lost = self._beginning_locked(found)
            finally:
                with self._sequences_lock:
                    self._beginning -= 1
                    self._waiting_changed.notify_all()

    def _beginning_locked(self, found: _After) -> _After:
        """Count the request that begins now, so that a drain waits for it."""
        self._beginning += found[0] is not None
        self._waiting_changed.notify_all()
        return found

    def _fail_waiting(self, request: Request, error: BaseException) -> None:
        """Complete a request that never reached the queue. The batcher counts it as refused."""
        self._counters.refused(error, request.rows_counted)
        complete, request.complete = request.complete, already_completed
        request.tensors = ()
        self._completer.call(complete, Outcome(error=error))

    def cancel(self, request: Request) -> bool:
        """Withdraw a request; see `Batcher.cancel`. If it has begun, its sequence ends."""
        tag = request.sequence
        if tag is not None and tag.id is not None:
            with self._sequences_lock:
                waited = self._table.withdraw(request, tag)
                self._waiting_changed.notify_all()
            if waited:
                self._fail_waiting(request, withdrawn(request, self._clock.now()))
                return True
        return super().cancel(request)

    # Ends.

    def end_stream(self, stream: object) -> None:
        """End the sequences of a stream that is over. Those with a running request end with it."""
        with self._sequences_lock:
            self._table.end_stream(stream)

    def lives(self, tag: SequenceTag) -> bool:
        """Return whether a request of this sequence would go on with it. May be late."""
        with self._sequences_lock:
            return self._table.lives(tag)

    def end_sequence(self, tag: SequenceTag) -> None:
        """End a sequence, if it lives, because another batcher begins it again."""
        with self._sequences_lock:
            self._table.end(tag)

    def _reap(self) -> None:
        """End idle sequences, on a thread of its own."""
        with self._sequences_lock:
            while not self._closing:
                until = self._table.expire(self._clock.now())
                self._clock.wait(self._closed, until)

    def sequence_statistics(self) -> SequenceStatistics:
        """Return counts since the start, and current sizes."""
        with self._sequences_lock:
            return self._table.statistics()

    @property
    def idle(self) -> bool:
        """Return whether nothing waits, is queued or running. May be late."""
        return super().idle and not self._table.waiting

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until all accepted requests are done; see `Batcher.wait_idle`."""
        if self._workers.owns_current_thread:
            return False
        until = self._until(timeout)
        with self._waiting_changed:
            if not self._none_waits_locked(until):
                return False
        return super().wait_idle(None if timeout is None else max(0.0, until - self._clock.now()))

    def _none_waits_locked(self, until: float) -> bool:
        """Wait until no accepted request is left that the batcher does not have; return false if it is too late."""
        while self._table.waiting or self._beginning:
            if self._clock.now() >= until:
                return False
            self._clock.wait(self._waiting_changed, until)
        return True

    def drain(self, timeout: float | None = None) -> bool:
        """Accept nothing new and wait until all accepted requests are done; see `Batcher.drain`."""
        until = self._until(timeout)
        with self._sequences_lock:
            self._closing = True
            self._closed.notify_all()
            # From a completion, it would wait for itself.
            if not self._workers.owns_current_thread and not self._none_waits_locked(until):
                return False
        return super().drain(None if timeout is None else max(0.0, until - self._clock.now()))

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Accept nothing new, finish, and join the threads; see `Batcher.close`."""
        until = self._until(timeout)
        if drain:
            self.drain(timeout)
        with self._sequences_lock:
            self._closing = True
            self._closed.notify_all()
        left = None if timeout is None else max(0.0, until - self._clock.now())
        ended = super().close(drain=drain, timeout=left)
        if threading.current_thread() is not self._reaper and not self._workers.owns_current_thread:
            self._reaper.join(left)
        return ended and not self._reaper.is_alive()
