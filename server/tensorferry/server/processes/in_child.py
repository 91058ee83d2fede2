"""A child's side: its channel to the parent, with which it ends, and the child of `run_in_child`."""

from __future__ import annotations

import fcntl
import logging
import os
import pickle
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from tensorferry.server.processes.child import MAX_ARGUMENT_BYTES, SIGNALS
from tensorferry.server.processes.messages import Channel, Message, MessageError

_log = logging.getLogger("tensorferry.server")

Callbacks = Mapping[str, Callable[[dict[str, Any]], None]]


def exit_at_once() -> NoReturn:
    """End the process without waiting for anything. Status 1."""
    os._exit(1)


class Parent:
    """The process that started this one, as a `Child` with this first argument. `send` is thread-safe.

    Create it on the main thread. From then on `SIGNALS` do nothing, because the parent decides when a child ends, and the
    kernel kills this process when the parent ends.
    """

    def __init__(self, descriptors: str, max_content: int = 0) -> None:
        channel, lifeline = map(int, descriptors.split(","))
        _end_only_with_parent(lifeline)
        for file in (channel, lifeline):
            os.set_inheritable(file, False)
        self._channel = Channel(socket.socket(fileno=channel), max_content)
        # Held while a message is sent, so that each is sent by one thread at a time. Waits only while the parent is stopped.
        self._send_lock = threading.Lock()

    def send(self, kind: str, fields: Mapping[str, Any] | None = None, content: bytes = b"") -> None:
        """Send a message. Nothing is sent once the parent has ended."""
        with self._send_lock:
            self._channel.send(kind, fields or {}, content)

    def receive(self) -> Message | None:
        """Wait for the next message; None if the channel is closed or unusable. One thread at a time may call this."""
        try:
            return self._channel.receive()
        except (OSError, MessageError) as error:
            _log.critical("the channel to the parent process is unusable (bug): %s", error)
            return None

    def obey(self, callbacks: Callbacks) -> None:
        """Call back for each kind of message, on a thread. The process exits if the parent is lost, or a callback raises.

        Messages without a callback are dropped. A callback must not wait for anything.
        """
        threading.Thread(target=self._obey, args=(callbacks,), name="control", daemon=True).start()

    def _obey(self, callbacks: Callbacks) -> None:
        try:
            while (message := self.receive()) is not None:
                callback = callbacks.get(message.kind)
                if callback is not None:
                    callback(message.fields)
        except OSError as error:
            # Clients may have taken every file that the process may open. The next process has them free.
            _log.critical("a message of the supervisor cannot be acted on: exiting at once: %s", error)
        except BaseException as error:
            _log.critical("the control thread crashed (bug): exiting at once", exc_info=error)
        exit_at_once()


def _end_only_with_parent(lifeline: int) -> None:
    """Let the kernel kill this process when the parent closes the other end of a pipe, as it does at the parent's end.

    Also while native code holds the interpreter. The parent-death signal of Linux would be sent at the end of the thread
    that started this process.
    """
    for number in SIGNALS:
        # A function that does nothing: programs that a user's code starts would inherit SIG_IGN.
        signal.signal(number, _ignore)
        signal.siginterrupt(number, False)
    # The parent has blocked them, so that none could end the process before this moment.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    try:
        os.read(lifeline, 1)
    except BlockingIOError:
        return
    # The parent had ended before.
    os._exit(1)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _run_function() -> None:
    """Run the function of `run_in_child`. It may crash, so it leaves no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parent = Parent(sys.argv[1], MAX_ARGUMENT_BYTES)
    message = parent.receive()
    if message is not None:
        function, argument = pickle.loads(message.content)
        function(argument, partial(parent.send, "sent"))
    # Native threads of what it has run could abort the process while the interpreter shuts down.
    os._exit(0)


if __name__ == "__main__":
    _run_function()
