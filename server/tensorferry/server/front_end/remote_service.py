"""The inference service of a front-end: it hands each message to the engine, and each response back to its call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tensorferry.batcher import BatcherError, QueueFull
from tensorferry.server.config.limits import RequestLimits
from tensorferry.server.errors import (
    ModelFailedError,
    NotReadyError,
    ServerError,
)
from tensorferry.server.front_end.absent_engine import HOLD_SECONDS, AbsentEngine
from tensorferry.server.front_end.engine_connection import EngineConnection, no_engine_error
from tensorferry.server.front_end.remote_call import HeldRequest, HeldRequests, RemoteCall
from tensorferry.server.front_end.report import FrontEndReport
from tensorferry.server.front_end.trials import Trials
from tensorferry.server.identity import ANONYMOUS, ClientIdentity, Metadata
from tensorferry.server.inference.interface import SHUTTING_DOWN, InlineRunner, status_of_reply
from tensorferry.server.inference.reply import FinishedCall, InferenceCall, InferenceReply, error_reply
from tensorferry.server.inference.unpacking import Unpacker
from tensorferry.server.link import FrontEndLink, LinkClosed
from tensorferry.server.link_messages import encode_origin
from tensorferry.server.refused_requests import REFUSED
from tensorferry.server.status import Status, StatusCode, StatusError, code_of
from tensorferry.server.wire.compression import decompress, is_compressed
from tensorferry.server.wire.structure import peek_request_id

if TYPE_CHECKING:
    from tensorferry.batcher import ResponseBurstHook


class NoEarlyRejection:
    """Every call's message is read. It stands in for `EarlyRejection`, which only the engine can decide."""

    tracing_enabled = False
    one_model = False

    def check(self, deadline: float) -> QueueFull | None:
        """Return None."""
        return None


class RemoteService:
    """Passes requests on to the engine. It stands in for `InferenceService` in a front-end. Thread-safe.

    While no engine is connected, new requests get UNAVAILABLE with a retry hint, but those that come at once after an engine
    was lost wait for the next one, as those do that the lost engine had. Those that may have ended it, and those that lose an engine twice, are for `trials`. `report` gets
    the refused requests.
    """

    def __init__(
        self,
        limits: RequestLimits,
        response_hook: ResponseBurstHook,
        trials: Trials,
        report: FrontEndReport | None = None,
        *,
        triton_status_codes: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = clock
        self.limits = limits
        self._report = report or FrontEndReport()
        self.early_rejection = NoEarlyRejection()
        self._response_hook = response_hook
        self._triton_status_codes = triton_status_codes
        # Whether this front-end has stopped accepting requests.
        self.draining = False
        self._trials = trials
        # Requests that wait for the next engine.
        self._waiting = HeldRequests()
        self._engine: EngineConnection | AbsentEngine = AbsentEngine(self._waiting)

    def connect(self, link: FrontEndLink) -> None:
        """Send requests to the engine at the other end of this link from now on, first those that wait."""
        self._report.attach(link)
        self._engine = EngineConnection(link, self._response_hook, self._keep)
        self._move_waiting()

    def disconnect(self) -> None:
        """Keep the requests of an engine that was lost, for the next one or a trial. No effect without one."""
        self._report.detach()
        engine = self._engine
        if isinstance(engine, EngineConnection):
            self._engine = AbsentEngine(
                self._waiting, self._now() + HOLD_SECONDS, expected=True, clock=self._now
            )
            engine.close()

    def give_up(self) -> None:
        """Answer the requests that wait for an engine: none comes soon."""
        self._engine = AbsentEngine(self._waiting)
        self._move_waiting()
        self._trials.close()

    def _move_waiting(self) -> None:
        """Send what waits to the engine, or fail it if none comes soon."""
        engine = self._engine
        if isinstance(engine, EngineConnection):
            while (request := self._waiting.take()) is not None:
                try:
                    engine.submit(*request)
                except LinkClosed:
                    request.fail(no_engine_error())
                except (ServerError, BatcherError) as error:
                    request.fail(error)
            engine.flush()
        elif not engine.expected:
            self._waiting.fail_all(no_engine_error)

    def _keep(self, waiting: Sequence[HeldRequest], begun: Sequence[HeldRequest]) -> None:
        once: list[HeldRequest] = []
        suspects = [*begun]
        for request in waiting:
            # A request can also end the engine before its batch begins, for example when its message is parsed.
            (suspects if request.call.lost else once).append(request)
        for request in once:
            request.call.lose()
        self._waiting.hold(once)
        self._trials.hold(suspects)

    def begin_drain(self) -> None:
        """Answer every further request with NotReadyError. Accepted requests continue."""
        self.draining = True

    def count_refused(self, code: StatusCode) -> None:
        """Count a request that was refused before it reached the engine. The engine's metrics report it."""
        self._report.count_refused(code)

    def status_of(self, error: BaseException, reply: InferenceReply | None = None) -> Status:
        """See `InferenceService.status_of`."""
        return status_of_reply(
            error, reply, triton=self._triton_status_codes, count_refused=self.count_refused
        )

    def submit(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Metadata = (),
        caller: ClientIdentity = ANONYMOUS,
        *,
        streamed: bool = False,
        run_soon: Callable[[InlineRunner], None] | None = None,
        unpacker: Unpacker | None = None,
    ) -> InferenceCall:
        """Send one serialised ModelInferRequest to the engine. See `InferenceService.submit`.

        With `run_soon`, the engine is woken by the connection's `run_inline`, for many requests at once.
        """
        try:
            if is_compressed(data):
                if unpacker is not None:
                    return unpacker.submit(data, deadline, complete, metadata, caller, streamed)
                data = decompress(data, self.limits.message_bytes)
            if self.draining:
                raise NotReadyError(SHUTTING_DOWN)
            if self._trials.refuses(data):
                raise ModelFailedError(REFUSED)
            call = RemoteCall(complete)
            engine = self._submit(call, data, deadline, encode_origin(caller, metadata, streamed))
        except Exception as error:
            if isinstance(error, (ServerError, BatcherError, StatusError)):
                # The traceback refers to the caller's frames; a reply that is never sent would keep its call alive.
                error.__traceback__ = error.__context__ = None
            self.count_refused(code_of(error, triton=self._triton_status_codes))
            complete(error_reply(peek_request_id(data), error, ("", ""), metadata))
            return FinishedCall(None)
        if run_soon is None:
            engine.flush()
        else:
            run_soon(engine)
        return call

    def _submit(
        self, call: RemoteCall, data: bytes, deadline: float, extra: bytes
    ) -> EngineConnection | AbsentEngine:
        while True:
            engine = self._engine
            try:
                engine.submit(call, data, deadline, extra)
            except LinkClosed:
                if engine is self._engine:
                    raise no_engine_error() from None
                # It has just ended; what stands in for it takes the request.
                continue
            if engine is not self._engine:
                # The next one may have come before the request was held.
                self._move_waiting()
            return engine
