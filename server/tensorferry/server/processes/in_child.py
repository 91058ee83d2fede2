"""A server process's side of the control channel."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from tensorferry.server.processes.control import ControlChannel, ControlError, Message

_log = logging.getLogger("tensorferry.server")

# From <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def exit_at_once() -> None:
    """End the process without waiting for anything. Status 1."""
    os._exit(1)


def _end_only_with_supervisor() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The supervisor has blocked them, so that none could end the process before this moment.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    # Also ends a process that hangs in native code. The end of the control channel covers a supervisor that ended before.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class InChild:
    """The process as a child of the supervisor: its first message, and a thread that calls back for the others.

    Create it first of all, on the main thread. From then on SIGTERM and SIGINT are ignored, because the supervisor decides
    when a child ends, and the kernel kills the process when the supervisor ends. `on_supervisor_lost` is
    called on the thread if the control channel is closed or unusable, or a callback raises.
    """

    def __init__(self, control_fd: int, on_supervisor_lost: Callable[[], None] = exit_at_once) -> None:
        _end_only_with_supervisor()
        os.set_inheritable(control_fd, False)
        self._channel = ControlChannel(socket.socket(fileno=control_fd))
        self._exit = on_supervisor_lost
        self._callbacks: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        # Held while a message is sent, so that each is sent by one thread at a time. Waits only while the supervisor is stopped.
        self._send_lock = threading.Lock()
        self.start = self._receive_start()

    def _receive_start(self) -> dict[str, Any]:
        message = self._receive()
        if message is None or message.kind != "start":
            self._channel.close()
            self._exit()
            raise SystemExit(1)
        return message.fields

    def on(self, kind: str, callback: Callable[[dict[str, Any]], None]) -> None:
        """Call `callback` with the fields of messages of a kind, on the thread. Call this before `run`.

        A callback must not wait for anything.
        """
        self._callbacks[kind] = callback

    def run(self) -> None:
        """Start the thread. Messages that came earlier are not lost. Those without a callback are dropped."""
        self._thread.start()

    def send(self, kind: str, /, **fields: Any) -> None:
        """Send a message to the supervisor. Thread-safe. Nothing is sent once the supervisor has ended."""
        with self._send_lock:
            try:
                self._channel.send(kind, fields)
            except (BrokenPipeError, ConnectionResetError):
                pass

    def failed(self, reason: str) -> None:
        """Report that the process cannot start, for the operator. Exit with status 1 after it."""
        self.send("failed", message=reason)

    def _receive(self) -> Message | None:
        try:
            return self._channel.receive()
        except (OSError, ControlError) as error:
            _log.critical("the supervisor's control channel is unusable (bug): %s", error)
            return None

    def _run(self) -> None:
        try:
            while (message := self._receive()) is not None:
                self._handle(message)
        except OSError as error:
            # Clients may have taken every file that the process may open. The next process has them free.
            _log.critical("a message of the supervisor cannot be acted on: exiting at once: %s", error)
        except BaseException as error:
            _log.critical("the control thread crashed (bug): exiting at once", exc_info=error)
        self._exit()

    def _handle(self, message: Message) -> None:
        callback = self._callbacks.get(message.kind)
        if callback is not None:
            callback(message.fields)
