"""The batcher of a model that hands on state: at most one request of a sequence runs, and batches hold many sequences."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tensorferry.batcher.batcher import Batcher
from tensorferry.batcher.clock import wait_for
from tensorferry.batcher.errors import (
    BatcherClosed,
    BatcherError,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
)
from tensorferry.batcher.execution.collate import tensor_of
from tensorferry.batcher.execution.completion import already_completed, withdrawn
from tensorferry.batcher.execution.model_functions import KeepsStates
from tensorferry.batcher.queue.client_quotas import ClientQuotas
from tensorferry.batcher.request import HeldTensor, Outcome, Request, SequenceTag, Tensor
from tensorferry.batcher.sequences.sequence import (
    ControlTensor,
    EndReason,
    SequenceLimits,
    SequenceStatistics,
    State,
    StateTensor,
    next_state,
    shown_to,
    state_bytes,
)
from tensorferry.batcher.sequences.sequence_table import Living, SequenceTable
from tensorferry.batcher.settings import ClientPolicy

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
        (`end_stream`), if a request is cancelled that has begun, or if one fails or expires. Its state is freed at once.
        A further request is refused with SequenceEnded, or with SequenceNotStarted if nothing is known of the sequence. A
        request that is refused by `enqueue`, or cancelled before it has begun, changes nothing.

    Bounds
        A start above the bounds of living sequences or of bytes of state is refused with QueueFull. A request whose states
        grow above that bound fails with QueueFull. No sequence is ended for another. `clients` also bounds the requests that
        wait for the one before them.

    `controls` are further inputs of the function, which say where a request stands in its sequence. Other arguments are those of `Batcher`. States are of fixed datatypes; their shape may change from request to request.
    """

    def __init__(
        self,
        model_fn: Any,
        states: Sequence[StateTensor],
        *,
        controls: Sequence[ControlTensor] = (),
        limits: SequenceLimits = SequenceLimits(),  # noqa: B008  (it is frozen)
        clients: ClientPolicy | None = None,
        **options: Any,
    ) -> None:
        shares = ClientPolicy(fair=True, weights=clients.weights) if clients and clients.fair else None
        super().__init__(model_fn, clients=shares, **options)
        self._states = tuple(states)
        self._controls = tuple(controls)
        self._initial = tuple(state.initial for state in states)
        self._state_outputs = frozenset(state.output for state in states)
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        settings = self._settings
        for function in model_fn if isinstance(model_fn, Sequence) else [model_fn]:
            if settings.max_batch_size and isinstance(function, KeepsStates):
                function.keep_states(self.states)
        self._table = SequenceTable(
            self._name,
            state_bytes(self._initial),
            limits,
            settings.max_queue_size,
            settings.max_queue_bytes,
        )
        # Not the queue's, because a request counts from its acceptance, also while it waits for the one before it.
        self._quotas = ClientQuotas(clients) if clients is not None and clients.bounds else None
        # Guards the table, the quotas and the fields below. While it is held, no request is enqueued or completed. The
        # queue's lock may be taken within it.
        self._sequences_lock = threading.Lock()
        # Notified when a request no longer waits for the one before it.
        self._waiting_changed = threading.Condition(self._sequences_lock)
        # Notified if the reaper must look earlier than at `_look_at`, or may have nothing to look at any more.
        self._look_due = threading.Condition(self._sequences_lock)
        self._look_at = -math.inf
        self._closing = False
        # Requests that have waited, and that the batcher does not have yet. True for those that were cancelled meanwhile.
        self._beginning: dict[Request, bool] = {}
        self._reaper = threading.Thread(target=self._reap, name=f"{self._name}-sequences", daemon=True)
        self._reaper.start()

    @property
    def states(self) -> Mapping[str, str]:
        """The outputs that are handed on, by their inputs."""
        return {state.input: state.output for state in self._states}

    # Requests.

    def enqueue(self, request: Request, *, notify: bool = True, skip_admission: bool = False) -> bool:
        """Accept a request of a sequence; see `Batcher.enqueue`. Also raises SequenceNotStarted and SequenceEnded."""
        self._check_one_row(request)
        quotas = self._quotas
        if quotas is None:
            return self._accept(request, notify=notify, skip_admission=skip_admission)
        complete, nbytes, drain_time = request.complete, request.nbytes, self.drain_time()
        with self._sequences_lock:
            now = self._clock.now()
            if not (self._closing or skip_admission):
                try:
                    quotas.check(request.client, 1, nbytes, now, lambda: drain_time)
                except BatcherError as error:
                    raise self._rejected(request, error) from None
            quotas.accepted((request,), now)

        def complete_counted(outcome: Outcome) -> None:
            # Its states are not counted.
            request.nbytes = nbytes
            with self._sequences_lock:
                quotas.done(request)
            complete(outcome)

        request.complete = complete_counted
        try:
            return self._accept(request, notify=notify, skip_admission=skip_admission)
        except BaseException:
            request.complete = complete
            with self._sequences_lock:
                quotas.rejected(request, now)
            raise

    def _check_one_row(self, request: Request) -> None:
        if request.rows != 1:
            raise self._rejected(
                request,
                InvalidRequest(
                    f"inference request to model {self._name!r} must specify batch-size 1 due to requirements of sequence "
                    f"batcher; the request has {request.rows} rows"
                ),
            )

    def answer_without_run(self, request: Request, outputs: Any) -> None:
        """Refuse a request of no rows as `enqueue` does; else see `Batcher.answer_without_run`."""
        self._check_one_row(request)
        super().answer_without_run(request, outputs)

    def _accept(self, request: Request, *, notify: bool, skip_admission: bool) -> bool:
        """Let a request begin, or wait for the one before it."""
        tag = request.sequence or _ALONE
        living: Living | None = None
        with self._sequences_lock:
            if self._closing:
                raise self._rejected(request, BatcherClosed("the batcher is closed; it accepts no requests"))
            if tag.id is not None:
                try:
                    living = self._table.admit(request, tag, self._clock.now())
                except Exception as error:
                    raise self._rejected(request, error) from None  # type: ignore[arg-type]
                if living is None:
                    if request.deadline < self._look_at:
                        self._look_at = request.deadline
                        self._look_due.notify()
                    return False
        if living is None:
            tag = tag._replace(start=True, end=True)
            return self._enter(request, tag, self._initial, self._alone(request, tag), notify, skip_admission)
        try:
            return self._begin(living, request, tag, notify=notify, skip_admission=skip_admission)
        except BaseException:
            self._go_on(living)
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
        states: tuple[State, ...],
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
            all_names = self._names_with_states(request.names)
        except ValueError as error:
            raise self._rejected(request, InvalidRequest(str(error))) from None
        tensors = tuple(map(_tensor, (*states, *controls)))
        request.tensors += tensors
        request.names = all_names
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
        return lambda outcome: complete(shown_to(tag, outcome, self._state_outputs))

    def _completed(
        self,
        living: Living,
        request: Request,
        tag: SequenceTag,
        complete: Callable[[Outcome], None],
        outcome: Outcome,
    ) -> None:
        """Take over the states of an outcome, complete the request, and let the next one of the sequence run."""
        states: tuple[State, ...] = ()
        if outcome.error is None:
            try:
                states = tuple(next_state(outcome.outputs[state.output], state) for state in self._states)
            except Exception as error:
                outcome = outcome._replace(outputs=None, error=error)
        outcome = shown_to(tag, outcome, self._state_outputs)
        with self._sequences_lock:
            if outcome.error is None and (full := self._table.no_room_for(living, tag, states)) is not None:
                outcome = outcome._replace(outputs=None, error=full)
            if outcome.error is None:
                self._table.answered(living, tag, states, self._clock.now())
            elif not isinstance(outcome.error, Cancelled):
                self._table.failed(living, tag, EndReason.FAILED)
            elif not math.isnan(request.started):
                self._table.failed(living, tag, EndReason.CANCELLED)
        try:
            complete(outcome)
        finally:
            # Afterwards, because clients must get a cause before what follows from it, and answers in their order.
            self._go_on(living)

    def _go_on(self, living: Living) -> None:
        """Enqueue the next request of a sequence, and fail those before it, whose sequence has ended."""
        while True:
            with self._sequences_lock:
                following, lost = self._table.next_after(living)
                if following is not None:
                    self._beginning[following] = False
                self._hand_out_locked(lost)
            self._fail_waiting(lost)
            if following is None:
                return
            tag, begun, cancelled = following.sequence or _ALONE, False, False
            try:
                # It was accepted, so the bounds of the queue do not hold for it any more.
                self._begin(living, following, tag, notify=True, skip_admission=True)
                begun = True
            except Exception as refusal:
                failed = [(following, refusal)]
                with self._sequences_lock:
                    self._table.failed(living, tag, EndReason.FAILED)
                    self._hand_out_locked(failed)
                self._fail_waiting(failed, counted=True)
            finally:
                with self._sequences_lock:
                    cancelled = self._beginning.pop(following)
                    self._waiting_changed.notify_all()
            if cancelled:
                super().cancel(following)
            if begun:
                return

    def _hand_out_locked(self, failed: Sequence[tuple[Request, BaseException]]) -> None:
        """Note that requests wait no more, so that a drain waits for their completions instead."""
        if failed:
            self._queue.hand_out([request for request, _ in failed])
        self._waiting_changed.notify_all()
        if self._closing:
            self._look_due.notify()

    def _fail_waiting(
        self, failed: Sequence[tuple[Request, BaseException]], *, counted: bool = False
    ) -> None:
        """Complete requests that were handed out and never reached the queue, and count them as refused unless they are."""
        with self._completer.handed_out([request for request, _ in failed]):
            for request, error in failed:
                if not counted:
                    self._counters.refused(error, request.rows_counted)
                complete, request.complete = request.complete, already_completed
                request.tensors = ()
                self._completer.call(complete, Outcome(error=error))

    def cancel(self, request: Request) -> bool:
        """Withdraw a request; see `Batcher.cancel`. If it has begun, or its deadline has passed, its sequence ends."""
        error = withdrawn(request, self._clock.now())
        with self._sequences_lock:
            waited = self._table.withdraw(request, ends=isinstance(error, DeadlineExceeded))
            if waited:
                self._hand_out_locked([(request, error)])
            elif request in self._beginning:
                self._beginning[request] = True
                return True
        if not waited:
            return super().cancel(request)
        self._fail_waiting([(request, error)])
        return True

    # Ends.

    def end_stream(self, stream: object) -> None:
        """End the sequences of a stream that is over. Those with a running request end with it."""
        with self._sequences_lock:
            self._table.end_stream(stream)

    def knows(self, tag: SequenceTag) -> bool:
        """Return whether a sequence lives, or why it ended is known and no other batcher began it again. May be late."""
        with self._sequences_lock:
            return self._table.knows(tag)

    def end_sequence(self, tag: SequenceTag) -> None:
        """End a sequence, if it lives, because another batcher begins it again."""
        with self._sequences_lock:
            self._table.end(tag)

    def _reap(self) -> None:
        """End idle sequences, and fail requests whose deadline passes while they wait, on a thread of its own."""
        while True:
            with self._sequences_lock:
                while (now := self._clock.now()) < self._look_at and (
                    self._table.waiting or not self._closing
                ):
                    self._clock.wait(self._look_due, self._look_at)
                if self._closing and not self._table.waiting:
                    return
                late, due = self._table.overdue(now)
                self._look_at = min(self._table.expire(now), due)
                failed = [(request, withdrawn(request, now)) for request in late]
                self._hand_out_locked(failed)
            self._fail_waiting(failed)

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
        with self._sequences_lock:
            if not self._none_waits_locked(until):
                return False
        return super().wait_idle(self._left(until))

    def _none_waits_locked(self, until: float) -> bool:
        """Wait until no accepted request is left that the batcher does not have; return false if it is too late."""
        return wait_for(
            self._clock,
            self._waiting_changed,
            lambda: not (self._table.waiting or self._beginning),
            until,
        )

    def drain(self, timeout: float | None = None) -> bool:
        """Accept nothing new and wait until all accepted requests are done; see `Batcher.drain`.

        Called from a completion, requests that wait for the one before them fail with BatcherClosed.
        """
        until = self._until(timeout)
        with self._sequences_lock:
            self._closing = True
            self._look_due.notify()
            # From a completion, it would wait for itself.
            if not self._workers.owns_current_thread and not self._none_waits_locked(until):
                return False
        return super().drain(self._left(until))

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Accept nothing new, finish, and join the threads; see `Batcher.close`."""
        until = self._until(timeout)
        if drain:
            self.drain(timeout)
        with self._sequences_lock:
            self._closing = True
            self._look_due.notify()
        left = self._left(until)
        ended = super().close(drain=drain, timeout=left)
        if threading.current_thread() is not self._reaper and not self._workers.owns_current_thread:
            self._reaper.join(left)
        return ended and not self._reaper.is_alive()


def _tensor(state: State) -> Tensor:
    return Tensor(state.dtype, state.shape, state) if isinstance(state, HeldTensor) else tensor_of(state)
