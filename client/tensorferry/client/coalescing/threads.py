"""ModelInfer of a synchronous channel that joins the calls of many threads."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc

from tensorferry.client.coalescing import joining, outcomes
from tensorferry.client.coalescing.calls import AnyCall, FutureCall, Message, Signal, WaitingCall
from tensorferry.client.coalescing.forms import Form, Forms
from tensorferry.client.coalescing.gathering import Gathering, Group
from tensorferry.client.coalescing.options import Coalesce
from tensorferry.protos import inference_pb2 as pb

# The sending thread ends after so long without work.
_IDLE_SECONDS = 1.0


class CoalescedInfer:
    """Replacement of the stub's ModelInfer, called in the same way. Thread-safe.

    A message is sent by the thread of one of its calls, which waits anyway. The thread of a group's
    first call also watches the time that the group may wait. Only groups that begin with a future
    need a thread of their own; it ends when it has nothing to do.

    After a fork, the child's calls are never joined, because calls that wait belong to the parent.
    """

    def __init__(
        self,
        method: Any,
        forms: Forms,
        options: Coalesce,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._method = method
        self._forms = forms
        self._clock = clock
        self._pid = os.getpid()
        # Guards the next three, and which thread sends a group; _closed may be read without it. No call
        # is started or completed while it is held.
        self._work_or_closed = threading.Condition(threading.Lock())
        self._gathering: Gathering[AnyCall] = Gathering(options.max_bytes, options.max_wait)
        self._running = False
        self._closed = False

    def __call__(
        self,
        request: pb.ModelInferRequest,
        timeout: float | None = None,
        metadata: Any = None,
        **options: Any,
    ) -> pb.ModelInferResponse:
        """Make a call and return its answer; raise grpc.RpcError."""
        options["metadata"] = metadata
        form = self._form(request, timeout, options)
        if form is None:
            answer: pb.ModelInferResponse = self._method(request, timeout=timeout, **options)
            return answer
        call = WaitingCall(request, self._deadline(timeout), options)
        try:
            self._admit(form, call)
            return self._outcome(call)
        except grpc.RpcError:
            raise
        except BaseException:
            # Such as KeyboardInterrupt: the other calls must not wait for this thread.
            self._leave(call)
            raise

    def future(
        self,
        request: pb.ModelInferRequest,
        timeout: float | None = None,
        metadata: Any = None,
        **options: Any,
    ) -> Any:
        """Begin a call and return its future, which is grpcio's or has the same methods."""
        options["metadata"] = metadata
        form = self._form(request, timeout, options)
        if form is None:
            return self._method.future(request, timeout=timeout, **options)
        call = FutureCall(request, self._deadline(timeout), options, self._begin)
        self._admit(form, call)
        return call

    def close(self) -> None:
        """End the calls that were not sent with CANCELLED. The channel's `close` ends all others."""
        with self._work_or_closed:
            self._closed = True
            dropped = self._gathering.drop()
            self._work_or_closed.notify()
        for group in dropped:
            for call in group.calls:
                call.fail(outcomes.client_closed())

    def _form(self, request: Any, timeout: float | None, options: dict[str, Any]) -> Form | None:
        if os.getpid() != self._pid or self._closed:
            return None
        return self._forms.form(request, timeout, options)

    def _deadline(self, timeout: float | None) -> float | None:
        return None if timeout is None else self._clock() + timeout

    # Groups.

    def _admit(self, form: Form, call: AnyCall) -> None:
        """Add a call, and have the groups sent that need not wait."""
        threadless: list[Group[AnyCall]] = []
        with self._work_or_closed:
            closed = self._closed
            if not closed:
                now = self._clock()
                group = self._gathering.add(form, call, call.deadline, now)
                taken = self._gathering.take(now)
                threadless = self._assign_locked(taken, call)
                if group not in taken and group.calls[0] is call:
                    if isinstance(call, WaitingCall):
                        call.due = group.due
                    else:
                        threadless += self._woken_locked()
        if closed:
            call.fail(outcomes.client_closed())
        self._start_all(threadless)

    def _assign_locked(
        self, groups: Sequence[Group[AnyCall]], own: AnyCall | None = None
    ) -> list[Group[AnyCall]]:
        """Let a waiting thread send each group, that of `own` if it can; return the groups without such a thread."""
        threadless = []
        for group in groups:
            waiting = [call for call in group.calls if isinstance(call, WaitingCall) and not call.cancelled()]
            if waiting:
                sender = next((call for call in waiting if call is own), waiting[0])
                sender.send(group)
            else:
                threadless.append(group)
        return threadless

    def _woken_locked(self) -> list[Group[AnyCall]]:
        """Let the sending thread look for work; return the groups to send if there can be no such thread."""
        if self._running:
            self._work_or_closed.notify()
            return []
        try:
            threading.Thread(target=self._run, name="tensorferry-coalesce", daemon=True).start()
        except (RuntimeError, MemoryError):
            # The system has no thread left, or the interpreter is exiting.
            return self._assign_locked(self._gathering.take(math.inf))
        self._running = True
        return []

    def _ended(self, group: Group[AnyCall], *, answered: bool) -> None:
        others: list[Group[AnyCall]] = []
        with self._work_or_closed:
            released = self._gathering.ended(group, answered=answered)
            if released is not None:
                first = released.calls[0]
                if isinstance(first, WaitingCall) and not first.cancelled():
                    first.released()
                else:
                    others = self._woken_locked()
        self._start_all(others)

    # A waiting thread.

    def _outcome(self, call: WaitingCall) -> pb.ModelInferResponse:
        """Return the call's answer; send the groups that this thread is to send meanwhile."""
        due = call.due
        while True:
            event = call.wait(None if due is None else max(0.0, due - self._clock()))
            if isinstance(event, pb.ModelInferResponse):
                return event
            if isinstance(event, Group):
                alone = self._send(call, event)
                if alone is not None:
                    return alone
            elif event is Signal.RELEASED:
                self._take(call, due or 0.0)
                due = None
            elif event is Signal.ALONE:
                answer: pb.ModelInferResponse = self._method(
                    call.request, timeout=self._left(call.deadline), **call.options
                )
                return answer
            else:
                raise event

    def _take(self, call: WaitingCall, due: float) -> None:
        """Have the groups sent that are due now, or were due at this time."""
        with self._work_or_closed:
            # The wait may end a little before its time.
            threadless = self._assign_locked(self._gathering.take(max(due, self._clock())), call)
        self._start_all(threadless)

    def _send(self, call: WaitingCall, group: Group[AnyCall]) -> pb.ModelInferResponse | None:
        """Send a group on this thread and complete its calls; return the answer if the call is alone."""
        calls: list[AnyCall] = []
        answer = failure = None
        answered = False
        try:
            # From here on, this method handles an exception, and not `_leave`.
            call.sending()
            calls = self._wanted(group, call)
            request = call.request if len(calls) == 1 else joining.join([one.request for one in calls])
            timeout = self._left(group.latest)
            try:
                answer = self._method(request, timeout=timeout, **call.options)
            except grpc.RpcError as error:
                if len(calls) == 1:
                    raise
                failure = error
            if len(calls) == 1:
                answered = True
                return answer
            answered = self._share(calls, answer, failure)
        except BaseException:
            for other in calls or group.calls:
                if other is not call:
                    self._repeat(other)
            raise
        finally:
            # Last, so that threads whose call is complete can join the next group.
            self._ended(group, answered=answered)
        return None

    def _leave(self, call: WaitingCall) -> None:
        """Let other threads do what a thread that left should have done."""
        with self._work_or_closed:
            group = call.leave()
            threadless = [] if group is None else self._assign_locked([group])
            threadless += self._woken_locked()
        self._start_all(threadless)

    # Groups without a waiting thread.

    def _run(self) -> None:
        while (groups := self._next_groups()) is not None:
            self._start_all(groups)

    def _next_groups(self) -> list[Group[AnyCall]] | None:
        """Wait until groups are due, and return those without a thread; None if this thread must end."""
        with self._work_or_closed:
            while True:
                now = self._clock()
                groups = self._gathering.take(now)
                if groups:
                    return self._assign_locked(groups)
                due = self._gathering.next_due()
                if due is not None:
                    self._work_or_closed.wait(due - now)
                elif self._closed or not self._work_or_closed.wait(_IDLE_SECONDS):
                    idle = self._gathering.next_due() is None
                    if idle:
                        self._running = False
                        return None

    def _start_all(self, groups: Sequence[Group[AnyCall]]) -> None:
        for group in groups:
            self._start(group)

    def _start(self, group: Group[AnyCall]) -> None:
        """Send a group; grpcio's thread will complete its calls."""
        calls = self._wanted(group)
        if not calls:
            self._ended(group, answered=False)
            return
        message = Message(calls)
        try:
            request = calls[0].request if len(calls) == 1 else joining.join([one.request for one in calls])
            sent = self._method.future(request, timeout=self._left(group.latest), **calls[0].options)
        except Exception as error:
            # The channel was closed in between, or this is a bug: no call may wait for ever.
            for call in calls:
                call.fail(outcomes.client_closed() if self._closed else error)
            self._ended(group, answered=False)
            return
        message.started(sent)
        sent.add_done_callback(partial(self._finish, group, calls))

    def _finish(self, group: Group[AnyCall], calls: Sequence[AnyCall], sent: Any) -> None:
        answered = False
        try:
            if sent.code() is grpc.StatusCode.OK:
                answered = self._share(calls, sent.result(), None)
            else:
                self._share(calls, None, sent)
        except Exception as error:
            # A bug. grpcio would only log it, and calls would wait for ever.
            for call in calls:
                call.fail(error)
        finally:
            self._ended(group, answered=answered)

    def _begin(self, call: FutureCall) -> Any:
        return self._method.future(call.request, timeout=self._left(call.deadline), **call.options)

    # Outcomes.

    def _wanted(self, group: Group[AnyCall], own: AnyCall | None = None) -> list[AnyCall]:
        """Return the calls that are neither cancelled nor too late, and always `own`."""
        now = self._clock()
        wanted = []
        for call in group.calls:
            if call is not own and call.deadline is not None and call.deadline <= now:
                call.fail(outcomes.deadline_passed())
            elif not call.cancelled():
                wanted.append(call)
        return wanted

    def _share(self, calls: Sequence[AnyCall], answer: pb.ModelInferResponse | None, failure: Any) -> bool:
        """Give each call its part of the outcome; return whether it has an answer."""
        if answer is not None:
            answers = joining.split(answer, [joining.rows_of(call.request) for call in calls])
            if answers is not None:
                for call, part in zip(calls, answers, strict=True):
                    call.answer(part)
                return True
        elif len(calls) == 1 or outcomes.is_shared(failure):
            for call in calls:
                call.fail(outcomes.copy_of(failure))
            return False
        late = failure is not None and failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        now = self._clock()
        for call in calls:
            if late and outcomes.is_too_late(call.deadline, now):
                call.fail(outcomes.deadline_passed())
            else:
                self._repeat(call)
        return False

    def _repeat(self, call: AnyCall) -> None:
        """Let a call be made alone."""
        try:
            call.repeat()
        except Exception as error:
            # The channel was closed in between.
            call.fail(outcomes.client_closed() if self._closed else error)

    def _left(self, deadline: float | None) -> float | None:
        return None if deadline is None else max(0.0, deadline - self._clock())
