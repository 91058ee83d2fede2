"""ModelInfer of an asyncio channel that joins the calls of many tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from tensorferry.client.coalescing import joining, outcomes
from tensorferry.client.coalescing.forms import Form, Forms
from tensorferry.client.coalescing.gathering import Gathering, Group
from tensorferry.client.coalescing.options import Coalesce
from tensorferry.protos import inference_pb2 as pb


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a message.

    Its future gets the answer; or the call's group if the task must send the request, alone; or
    None if it must do so after the message failed.
    """

    request: pb.ModelInferRequest
    deadline: float | None
    options: dict[str, Any]
    future: asyncio.Future[pb.ModelInferResponse | Group[_Call] | None]
    message: _Message | None = None

    def answer(self, outcome: pb.ModelInferResponse | Group[_Call] | None) -> None:
        if not self.future.done():
            self.future.set_result(outcome)

    def fail(self, failure: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(failure)


@dataclass(slots=True, eq=False)
class _Message:
    """A message in flight, and its calls."""

    calls: Sequence[_Call]
    call: Any = field(default=None)

    def cancel_if_unwanted(self) -> None:
        """Cancel the message if all its calls are cancelled."""
        if self.call is not None and all(call.future.cancelled() for call in self.calls):
            self.call.cancel()


class CoalescedInfer:
    """Replacement of the stub's ModelInfer, called in the same way, on one event loop.

    Calls that begin in the same turn of the event loop are sent together at its end, also if
    nothing is in flight.
    """

    def __init__(self, method: Any, forms: Forms, options: Coalesce) -> None:
        self._method = method
        self._forms = forms
        self._gathering: Gathering[_Call] = Gathering(options.max_bytes, options.max_wait)
        self._flushing = False
        self._timer: asyncio.TimerHandle | None = None
        # Tasks of messages; the event loop has only weak references.
        self._messages: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __call__(
        self,
        request: pb.ModelInferRequest,
        timeout: float | None = None,
        metadata: Any = None,
        **options: Any,
    ) -> pb.ModelInferResponse:
        """Make a call and return its answer; raise grpc.RpcError."""
        options["metadata"] = metadata
        form = self._forms.form(request, timeout, options)
        if form is None or self._closed:
            return await self._alone(request, timeout, options)
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        call = _Call(request, deadline, options, loop.create_future())
        self._add(loop, form, call)
        try:
            outcome = await call.future
        except asyncio.CancelledError:
            self._cancelled(call)
            raise
        if isinstance(outcome, pb.ModelInferResponse):
            return outcome
        left = None if deadline is None else max(0.0, deadline - loop.time())
        if outcome is None:
            return await self._alone(request, left, options)
        answered = False
        try:
            answer = await self._alone(request, left, options)
            answered = True
        finally:
            self._ended(outcome, answered=answered)
        return answer

    def close(self) -> None:
        """End the calls that were not sent with CANCELLED. The channel's `close` ends all others."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for group in self._gathering.drop():
            for call in group.calls:
                call.fail(outcomes.client_closed())

    async def _alone(
        self, request: pb.ModelInferRequest, timeout: float | None, options: dict[str, Any]
    ) -> pb.ModelInferResponse:
        answer: pb.ModelInferResponse = await self._method(request, timeout=timeout, **options)
        return answer

    def _add(self, loop: asyncio.AbstractEventLoop, form: Form, call: _Call) -> None:
        now = loop.time()
        self._gathering.add(form, call, call.deadline, now)
        if self._gathering.released():
            self._flush_soon()
        elif self._timer is None:
            due = self._gathering.next_due()
            assert due is not None
            self._timer = loop.call_at(due, self._timed_out)

    def _timed_out(self) -> None:
        self._timer = None
        self._flush()

    def _flush_soon(self) -> None:
        """Send what can be sent, after the tasks that are ready to run."""
        if not self._flushing and not self._closed:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        loop = asyncio.get_running_loop()
        for group in self._gathering.take(loop.time()):
            self._send(loop, group)
        due = self._gathering.next_due()
        if due is not None and self._timer is None:
            self._timer = loop.call_at(due, self._timed_out)

    def _send(self, loop: asyncio.AbstractEventLoop, group: Group[_Call]) -> None:
        now = loop.time()
        calls = []
        for call in group.calls:
            if call.deadline is not None and call.deadline <= now:
                call.fail(outcomes.deadline_passed())
            elif not call.future.done():
                calls.append(call)
        if not calls:
            self._ended(group, answered=False)
        elif len(calls) == 1:
            calls[0].answer(group)
        else:
            task = loop.create_task(self._deliver(group, calls), name="tensorferry-coalesce")
            self._messages.add(task)
            task.add_done_callback(self._messages.discard)

    async def _deliver(self, group: Group[_Call], calls: Sequence[_Call]) -> None:
        """Send the calls in one message, and give each its part of the outcome."""
        answered = False
        try:
            answered = await self._share(group, calls)
        except asyncio.CancelledError:
            # grpcio raises it for a closed channel.
            for call in calls:
                call.fail(outcomes.client_closed())
        except Exception as error:
            # A bug: no call may wait for ever.
            for call in calls:
                call.fail(error)
        finally:
            self._ended(group, answered=answered)

    async def _share(self, group: Group[_Call], calls: Sequence[_Call]) -> bool:
        loop = asyncio.get_running_loop()
        request = joining.join([call.request for call in calls])
        timeout = None if group.latest is None else group.latest - loop.time()
        message = _Message(calls, self._method(request, timeout=timeout, **calls[0].options))
        for call in calls:
            call.message = message
        message.cancel_if_unwanted()
        late = False
        try:
            answer = await message.call
        except grpc.RpcError as error:
            if outcomes.is_shared(error):
                for call in calls:
                    call.fail(outcomes.copy_of(error))
                return False
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            answers = joining.split(answer, [joining.rows_of(call.request) for call in calls])
            if answers is not None:
                for call, part in zip(calls, answers, strict=True):
                    call.answer(part)
                return True
        now = loop.time()
        for call in calls:
            if late and outcomes.is_too_late(call.deadline, now):
                call.fail(outcomes.deadline_passed())
            else:
                call.answer(None)
        return False

    def _cancelled(self, call: _Call) -> None:
        """Release what belongs to a call whose task was cancelled."""
        if call.message is not None:
            call.message.cancel_if_unwanted()
        elif call.future.done() and not call.future.cancelled() and call.future.exception() is None:
            outcome = call.future.result()
            if isinstance(outcome, Group):
                self._ended(outcome, answered=False)

    def _ended(self, group: Group[_Call], *, answered: bool) -> None:
        self._gathering.ended(group, answered=answered)
        if self._gathering.released():
            self._flush_soon()
