"""Self-test of the lane with the installed grpcio, run at every start.

Any release of grpcio may change what `cygrpc` uses. So every kind of operation makes a real round trip before the
lane serves clients.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc

from tensorferry.server.config.limits import RequestLimits
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import NotFoundError
from tensorferry.server.identity import ANONYMOUS, ROLES, ClientIdentity, Metadata
from tensorferry.server.inference.reply import BuiltReply, InferenceCall, InferenceReply
from tensorferry.server.inference.responses.stream_responses import stream_response
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.security.access_control import AccessControl, ClientCertificate
from tensorferry.server.status import Status, StatusCode, status_of
from tensorferry.server.system.scratch_directory import ScratchDirectory
from tensorferry.server.transport.lane.lane import STREAM, Lane
from tensorferry.server.transport.lane.unary import UNARY
from tensorferry.server.transport.transport_state import TransportState

_HELD = b"held until the client leaves"
_NAME = "x-tensorferry-proof"

# A step that takes longer has failed.
_SECONDS = 10.0


class _Echo(InferenceCall):
    """A service that returns each message on another thread; and the call of one request, held until its client leaves."""

    limits = RequestLimits()
    draining = tracing_enabled = one_model = False

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self.held = threading.Event()
        self.left = threading.Event()

    def submit(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Metadata = (),
        caller: ClientIdentity = ANONYMOUS,
        **options: Any,
    ) -> InferenceCall:
        if data == _HELD:
            self.held.set()
            return self

        def build() -> list[bytes]:
            value = dict(metadata).get(_NAME)
            remaining = deadline - time.monotonic()
            if value is None or not 0 < remaining < 2 * _SECONDS:
                raise NotFoundError(f"{value!r}, {remaining}")
            if caller.name != "unix":
                raise NotFoundError(f"a call of {caller}")
            return [bytes(data)]

        self._threads.submit(complete, BuiltReply("", build))
        return InferenceCall()

    def cancel(self) -> None:
        self.left.set()

    def reject_early(self, deadline: float) -> None:
        """See `InferenceService.reject_early`."""

    def end_stream(self, stream: object) -> None:
        """See `InferenceService.end_stream`."""

    def count_refused(self, code: StatusCode) -> None:
        pass

    def status_of(self, error: BaseException, reply: InferenceReply | None = None) -> Status:
        return status_of(error)


class _CheckingAccess(AccessControl):
    """Reads everything that can be read of a call."""

    def admit(
        self,
        role: str,
        metadata: Metadata,
        peer: Callable[[], str],
        certificate: Callable[[], ClientCertificate],
    ) -> ClientIdentity:
        found = certificate()
        if found != ClientCertificate(None, ()):
            raise NotFoundError(f"the certificate {found} of a connection that has none")
        return ClientIdentity(peer().partition(":")[0], ROLES)


class _ProbedLane(Lane):
    """A lane that keeps the first unexpected exception."""

    error: BaseException | None = None

    def _on_crash(self, tag: Any) -> None:
        error = sys.exception()
        if error is not None and self.error is None:
            # The traceback's frames would keep the call alive, which ends only when it is released.
            self.error = error.with_traceback(None)


def run_selftest() -> None:
    """Make real calls through a lane on a server of its own; raise an exception if any result is wrong."""
    with ThreadPoolExecutor(2, thread_name_prefix="lane-selftest") as threads:
        # A process that is killed during its self-test leaves it, and a later process removes it.
        folder = ScratchDirectory()
        server = grpc.server(threads)
        echo = _Echo(threads)
        # It has what a lane uses of the service.
        service = cast(InferenceService, echo)
        shared = TransportState(ServerConfig(models=()))
        shared.access = _CheckingAccess()
        lane = _ProbedLane(server, service, shared, max_streams=1, max_in_flight=2)
        address = f"unix:{folder.path}/selftest"
        server.add_insecure_port(address)
        server.start()
        grace = None
        try:
            lane.start()
            with grpc.insecure_channel(address) as channel:
                _try_calls(channel)
                _try_stream(channel)
                _try_cancel(channel, echo)
            # Without a grace period core would send connected clients an error and log it.
            grace = _SECONDS
        except Exception as error:
            # The lane's own exception says more than the client's status.
            raise lane.error or _on_one_line(error) from None
        finally:
            stopped = server.stop(grace).wait(_SECONDS)
            folder.remove()
        if lane.error is not None:
            raise lane.error
        _check(stopped, "the server to stop", None)


def _try_calls(channel: grpc.Channel) -> None:
    method: Any = channel.unary_unary(UNARY)
    _check(method(b"one", timeout=_SECONDS, metadata=((_NAME, "1"),)) == b"one", "an answer", None)
    try:
        method(b"one", timeout=_SECONDS)
    except grpc.RpcError as error:
        status: Any = error
        _check(status.code() is grpc.StatusCode.NOT_FOUND, "the status NOT_FOUND", status.code())
        _check("None" in status.details(), "the status's message", status.details())
    else:
        _check(False, "a status", None)


def _try_stream(channel: grpc.Channel) -> None:
    messages = [bytes([number]) for number in range(5)]

    def requests() -> Iterator[bytes]:
        yield from messages

    method: Any = channel.stream_stream(STREAM)
    answers = list(method(requests(), timeout=_SECONDS, metadata=((_NAME, "1"),)))
    expected = [b"".join(stream_response([message])) for message in messages]
    _check(answers == expected, f"the stream {expected}", answers)


def _try_cancel(channel: grpc.Channel, echo: _Echo) -> None:
    method: Any = channel.unary_unary(UNARY)
    call = method.future(_HELD, timeout=_SECONDS)
    _check(echo.held.wait(_SECONDS), "a request", None)
    call.cancel()
    _check(echo.left.wait(_SECONDS), "the cancellation of a client that left", None)


def _on_one_line(error: Exception) -> Exception:
    if not isinstance(error, grpc.RpcError):
        return error
    status: Any = error
    return LookupError(f"a call ended with {status.code().name}: {status.details()}")


def _check(holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise LookupError(f"expected {expected}, got {got!r}")
