"""Proves at start, on a server of its own, that the lane works with the grpcio that is installed.

grpcio may change what `grpc_core` uses in any release. So every kind of operation goes to and fro
once before the lane serves anybody.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from tensorferry.batcher import Batcher
from tensorferry.server.errors import NotFoundError
from tensorferry.server.identity import ANONYMOUS, ROLES, ClientIdentity, Metadata
from tensorferry.server.inference.reply import BuiltReply, InferenceCall, InferenceReply
from tensorferry.server.inference.responses import stream_response
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.registry import ModelRegistry
from tensorferry.server.security.access_control import AccessControl, ClientCertificate
from tensorferry.server.transport.lane.lane import STREAM, Lane
from tensorferry.server.transport.lane.unary import UNARY

_HELD = b"held until the client leaves"
_NAME = "x-tensorferry-proof"

# Anything that takes longer than this does not work: a bound, not a delay.
_SECONDS = 10.0


class _HeldCall(InferenceCall):
    __slots__ = ("cancelled",)

    def __init__(self, cancelled: threading.Event) -> None:
        super().__init__()
        self.cancelled = cancelled

    def cancel(self) -> None:
        self.cancelled.set()


class _Echo(InferenceService):
    """Answers with what it got, on a thread of its own; keeps one request until its client leaves."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        super().__init__(ModelRegistry())
        self._threads = threads
        self.held = threading.Event()
        self.left = threading.Event()

    def submit(
        self,
        data: bytes,
        deadline: float,
        complete: Callable[[InferenceReply], None],
        metadata: Metadata = (),
        needs_run: set[Batcher] | None = None,
        caller: ClientIdentity = ANONYMOUS,
    ) -> InferenceCall:
        if data == _HELD:
            self.held.set()
            return _HeldCall(self.left)

        def build() -> list[bytes]:
            value = dict(metadata).get(_NAME)
            remaining = deadline - time.monotonic()
            if value is None or not 0 < remaining < 2 * _SECONDS:
                raise NotFoundError(f"{value!r}, {remaining}")
            if caller.name != "unix":
                raise NotFoundError(f"a call of {caller}")
            return [data]

        self._threads.submit(complete, BuiltReply("", build))
        return InferenceCall()


class _CheckingAccess(AccessControl):
    """Finds out of each call what can be found out of one."""

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
    """Keeps what goes wrong within an event, for whoever tries it."""

    error: BaseException | None = None

    def _on_crash(self, tag: Any) -> None:
        error = sys.exception()
        if error is not None and self.error is None:
            # Its frames would keep the call, which ends when nobody has it any more.
            self.error = error.with_traceback(None)


def prove() -> None:
    """Raises, whatever is at fault, unless calls, statuses, streams and cancels go through the lane."""
    with (
        ThreadPoolExecutor(2, thread_name_prefix="lane-proof") as threads,
        tempfile.TemporaryDirectory() as folder,
    ):
        server = grpc.server(threads)
        echo = _Echo(threads)
        lane = _ProbedLane(server, echo, max_streams=1, max_in_flight=2, access=_CheckingAccess())
        address = f"unix:{folder}/proof"
        server.add_insecure_port(address)
        server.start()
        grace = None
        try:
            lane.start()
            with grpc.insecure_channel(address) as channel:
                _try_calls(channel)
                _try_stream(channel)
                _try_leaving(channel, echo)
            # Without one, core tells whoever is still connected of an error, and the user that it came.
            grace = _SECONDS
        except Exception as error:
            # A client is told less of what went wrong.
            raise lane.error or _in_a_line(error) from None
        finally:
            stopped = server.stop(grace).wait(_SECONDS)
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


def _try_leaving(channel: grpc.Channel, echo: _Echo) -> None:
    method: Any = channel.unary_unary(UNARY)
    call = method.future(_HELD, timeout=_SECONDS)
    _check(echo.held.wait(_SECONDS), "a request", None)
    call.cancel()
    _check(echo.left.wait(_SECONDS), "to hear of a client that left", None)


def _in_a_line(error: Exception) -> Exception:
    if not isinstance(error, grpc.RpcError):
        return error
    status: Any = error
    return LookupError(f"a call ended with {status.code().name}: {status.details()}")


def _check(holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise LookupError(f"expected {expected}, got {got!r}")
