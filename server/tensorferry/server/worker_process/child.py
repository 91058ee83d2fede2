"""The server's side of one child process: its start, the exchange of messages, and its end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tensorferry.server.errors import StartError
from tensorferry.server.processes.child import Ending
from tensorferry.server.worker_process.array_memory import Array, ArrayMemory, create_memory
from tensorferry.server.worker_process.channel import Unpacker, packed
from tensorferry.server.worker_process.errors import FunctionRaised
from tensorferry.server.worker_process.function_process import ERROR, RAISED, READY, RUN
from tensorferry.server.worker_process.model_calls import CALL, OVER, ServedCalls
from tensorferry.server.worker_process.values import decode, encode

_MODULE = "tensorferry.server.worker_process"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ChildEnded(Exception):
    """The process has ended, or sent what is no message. Call `reap`."""


class Child:
    """A child process. One thread at a time uses it; `kill` is thread-safe. OSError if it cannot be started.

    It is killed with the last reference to this object.

    It has a process group of its own: a Ctrl-C at a terminal does not reach it, and processes that the user's code has
    started are killed with it.
    """

    def __init__(self, app: Path, model: str) -> None:
        self._unpacker = Unpacker()
        self._unsent = bytearray()
        self._number = 0
        # Whether the process has a batch that it has not answered.
        self.running = False
        # Guards _reaped, so that no other process that got the same id is killed.
        self._lock = threading.Lock()
        self._reaped = False
        with ExitStack() as stack:
            server, theirs = socket.socketpair()
            stack.callback(server.close)
            with ExitStack() as inherited:
                inherited.callback(theirs.close)
                read_end, lifeline = os.pipe()
                inherited.callback(os.close, read_end)
                stack.callback(os.close, lifeline)
                inputs = create_memory("tensorferry-inputs")
                self._inputs = ArrayMemory(inputs)
                stack.callback(self._inputs.close)
                outputs = create_memory("tensorferry-outputs")
                self._outputs = ArrayMemory(outputs)
                stack.callback(self._outputs.close)
                self._process = _start((theirs.fileno(), read_end, inputs, outputs), app, model)
            self.pid = self._process.pid
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except OSError:
                self._process.kill()
                self._process.wait()
                raise
            stack.callback(os.close, self._pidfd)
            files = stack.pop_all()
        # Also without `reap`, if the model that it is for cannot be loaded.
        self._finalizer = weakref.finalize(self, _abandon, self._process, files)
        server.setblocking(False)
        self._server = server
        self._poll = select.poll()
        self._poll.register(server, select.POLLIN)
        # A process that the user's code has forked can hold the socket open.
        self._poll.register(self._pidfd, select.POLLIN)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended yet."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    @property
    def began_run(self) -> bool:
        """Whether the process has begun the last run that it was sent."""
        return self._outputs.begun == self._number

    def await_ready(self) -> None:
        """Wait until the function is loaded. StartError if it cannot be, ChildEnded if the process ended."""
        kind, *fields = self._next(None)
        if kind != READY:
            raise StartError(*fields)

    def run(self, inputs: Mapping[str, Array]) -> Any:
        """Run the function on a batch and return what it returned.

        Raises FunctionRaised; ServerError, BatcherError or MemoryError if the function did; or ChildEnded.
        """
        self._number += 1
        self._inputs.begin(self._number)
        message = packed(RUN, self._number, encode(inputs, self._inputs, "the inputs"))
        self.running = True
        kind, content = self._exchange(message)
        self.running = False
        if kind == RAISED:
            raise FunctionRaised(content)
        if kind == ERROR:
            raise content.exception()
        try:
            return decode(content, self._outputs)
        except (TypeError, ValueError) as error:
            raise ChildEnded(f"it returned what cannot be read: {error}") from None

    def _exchange(self, message: bytes) -> tuple[Any, ...]:
        """Send a message and return the answer. Serve calls of other models meanwhile."""
        self._send(message)
        calls: ServedCalls | None = None
        try:
            while (answer := self._next(calls))[0] == CALL:
                if calls is None:
                    calls = ServedCalls()
                    self._poll.register(calls.wake_fd, select.POLLIN)
                calls.begin(*answer[1:])
        finally:
            if calls is not None:
                self._poll.unregister(calls.wake_fd)
                calls.end()
        if calls is not None:
            # If it has ended since, the answer is valid nevertheless.
            with suppress(ChildEnded):
                self._send(packed(OVER))
                while self._unsent:
                    self._wait(None)
        return answer

    def kill(self) -> None:
        """Kill the process and those of its group. Idempotent."""
        with self._lock:
            if not self._reaped:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)

    def end(self, timeout: float) -> Ending:
        """Let the process end, kill it after `timeout` seconds, and `reap` it."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll(timeout * 1e3)
        return self.reap()

    def reap(self) -> Ending:
        """Kill the process if it lives, wait for it, release everything, and return how it ended."""
        with self._lock:
            # Not killed by `kill` any more: after the wait, another process can get the same id.
            self._reaped = True
        self._finalizer()
        return Ending.of(self._process.returncode)

    def _next(self, calls: ServedCalls | None) -> tuple[Any, ...]:
        """Return the next message. Send what is queued and answers to calls meanwhile."""
        while True:
            try:
                message = self._unpacker.take()
            except Exception as error:
                raise ChildEnded(f"it sent what is no message: {error}") from None
            if message is not None:
                return message
            self._wait(calls)

    def _wait(self, calls: ServedCalls | None) -> None:
        """Wait until there is something to receive or to send, and do that."""
        ready = dict(self._poll.poll())
        socket_ready = ready.get(self._server.fileno(), 0)
        if socket_ready & select.POLLOUT:
            self._send(b"")
        if socket_ready & ~select.POLLOUT:
            try:
                if not self._unpacker.receive(self._server):
                    raise ChildEnded
            except ConnectionResetError:
                raise ChildEnded from None
        elif self._pidfd in ready:
            raise ChildEnded
        if calls is not None and calls.wake_fd in ready:
            for answer in calls.answers():
                self._send(answer)

    def _send(self, data: bytes) -> None:
        """Send without waiting. What the socket does not take is queued."""
        waited = bool(self._unsent)
        if waited:
            self._unsent += data
        try:
            sent = self._server.send(self._unsent if waited else data)
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            raise ChildEnded from None
        if waited:
            del self._unsent[:sent]
        else:
            self._unsent += data[sent:]
        if waited != bool(self._unsent):
            self._poll.modify(self._server, select.POLLIN | (select.POLLOUT if self._unsent else 0))


def _abandon(process: subprocess.Popen[bytes], files: ExitStack) -> None:
    """Kill the process and those of its group, wait for it, and release everything."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    files.close()


def _start(files: tuple[int, ...], app: Path, model: str) -> subprocess.Popen[bytes]:
    # Blocked until the process ignores them: systemd sends SIGTERM to every process of a service.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return subprocess.Popen(
            # -P, because a module in the working directory must not replace one of the server.
            [sys.executable, "-P", "-m", _MODULE, *map(str, files), str(app), model],
            stdin=subprocess.DEVNULL,
            pass_fds=files,
            process_group=0,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
