"""The child's side: runs the function on each batch that the server sends."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tensorferry.batcher import BatcherError
from tensorferry.server.errors import ServerError, StartError
from tensorferry.server.functions.app_file import find_function, import_app
from tensorferry.server.functions.call import Call, bound_call
from tensorferry.server.functions.failure import describe, traceback_text
from tensorferry.server.threads import watch_threads
from tensorferry.server.worker_process.array_memory import ArrayMemory
from tensorferry.server.worker_process.channel import Unpacker, packed
from tensorferry.server.worker_process.model_calls import CallsToServer
from tensorferry.server.worker_process.sent_error import SentError
from tensorferry.server.worker_process.values import decode, encode
from tensorferry.serving import DeclarationError, FunctionModel, calls_through

# Messages. The child sends READY or NOT_READY once, and RETURNED, RAISED or ERROR for each RUN.
READY, NOT_READY, RUN = "ready", "not ready", "run"
RETURNED, RAISED, ERROR = "returned", "raised", "error"

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_process(arguments: Sequence[str]) -> None:
    """Load the function and run it until the server closes the socket."""
    connection, lifeline, inputs, outputs = (int(each) for each in arguments[:4])
    path, model = Path(arguments[4]), arguments[5]
    _end_only_with_server(lifeline)
    faulthandler.enable()
    watch_threads(lambda: None)
    for file in (connection, lifeline, inputs, outputs):
        os.set_inheritable(file, False)
    with socket.socket(fileno=connection) as server:
        try:
            declared = find_function(import_app(path), model, path)
            call = _bound(declared, path)
        except StartError as error:
            server.sendall(packed(NOT_READY, str(error)))
            return
        server.sendall(packed(READY))
        _FunctionProcess(server, ArrayMemory(inputs), ArrayMemory(outputs), call).serve()


def _end_only_with_server(lifeline: int) -> None:
    """Let the kernel kill this process when the server closes the other end of a pipe, as it does at the server's end.

    Also while native code holds the interpreter. The parent-death signal of Linux would be sent at the end of the thread
    that started this process.
    """
    for number in _SIGNALS:
        # A function that does nothing: programs that the user's code starts would inherit SIG_IGN.
        signal.signal(number, _ignore)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    try:
        os.read(lifeline, 1)
    except BlockingIOError:
        return
    # The server had ended before.
    os._exit(1)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _bound(declared: FunctionModel, path: Path) -> Call:
    try:
        return bound_call(declared)
    except DeclarationError as error:
        raise StartError(f"{path}: {error}") from None
    except BaseException as error:
        raise StartError(
            f"{path}: model {declared.name!r} cannot be loaded:\n{traceback_text(error)}"
        ) from None


class _FunctionProcess:
    def __init__(self, server: socket.socket, inputs: ArrayMemory, outputs: ArrayMemory, call: Call) -> None:
        self._server = server
        self._inputs = inputs
        self._outputs = outputs
        self._call = call
        self._unpacker = Unpacker()

    def serve(self) -> None:
        while (message := self._receive()) is not None:
            _, number, sent = message
            self._outputs.begin(number)
            calls = CallsToServer(self._server, self._unpacker)
            calls.end(self._answer(sent, calls))

    def _receive(self) -> tuple[Any, ...] | None:
        while (message := self._unpacker.take()) is None:
            if not self._unpacker.receive(self._server):
                return None
        return message

    def _answer(self, sent: Any, calls: CallsToServer) -> bytes:
        try:
            inputs = decode(sent, self._inputs)
            with calls_through(calls):
                returned = self._call(inputs)
            return packed(RETURNED, encode(returned, self._outputs))
        except (ServerError, BatcherError, MemoryError) as error:
            # Of another model that the function called. A MemoryError lets the batch run in parts.
            return packed(ERROR, SentError.of(error))
        except BaseException as error:
            return packed(RAISED, describe(error))
