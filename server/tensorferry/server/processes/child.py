"""A child process as its parent sees it: its start, its messages, how it ended, and when another may be started."""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from tensorferry.server.processes.messages import Channel, Message, MessageError

_log = logging.getLogger("tensorferry.server")

_T = TypeVar("_T")

# A child for which this many bytes wait, beside the largest content, does not work.
_MAX_UNSENT_BYTES = 16 << 20
# What operators send to a server. A child does nothing at them.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The child of `run_in_child`, and the most bytes of its argument.
_FUNCTION_MODULE = "tensorferry.server.processes.in_child"
MAX_ARGUMENT_BYTES = 1 << 30
# Delays before a process is started again, and the run after which it had started well.
_FIRST_DELAY, _LONGEST_DELAY, _RECOVERED_SECONDS = 0.1, 10.0, 10.0


class ChildEnded(Exception):
    """The child has ended, or closed its channel."""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a child ended. `signal` is 0 if it exited by itself, or could not be started."""

    description: str
    signal: int = 0

    @property
    def clean(self) -> bool:
        """Whether it exited with status 0."""
        return self.description == "exit status 0"

    @classmethod
    def of(cls, status: int) -> ExitStatus:
        """Return that of an exit status, or of the negative number of a signal."""
        if status >= 0:
            return cls(f"exit status {status}")
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return cls(f"killed by {name}", -status)


class Child:
    """A fresh interpreter that runs `module`, with descriptors for `Parent` before its arguments.

    One thread at a time uses it; `kill` is thread-safe. OSError if it cannot be started. The kernel kills it when this
    process ends. It is also killed with the last reference to this object.

    It inherits the files `inherited` under the same numbers, and `variables` beside the environment's. With `own_group` it
    has a process group, which is killed as a whole: its own children end with it, and a terminal's Ctrl-C does not reach
    it. With `quiet` its output is discarded. `max_content` is that of the channel. `files` are closed after its end.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        inherited: Sequence[int] = (),
        variables: Mapping[str, str] | None = None,
        own_group: bool = False,
        quiet: bool = False,
        max_content: int = 0,
        files: ExitStack | None = None,
    ) -> None:
        self._own_group = own_group
        # Guards _reaped: after that, another process can have the same id.
        self._lock = threading.Lock()
        self._reaped = False
        output = subprocess.DEVNULL if quiet else None
        with ExitStack() as stack, ExitStack() as theirs:
            if files is not None:
                stack.push(files)
            ours, socket_of_child = socket.socketpair()
            theirs.enter_context(socket_of_child)
            self.channel = Channel(ours, max_content)
            stack.callback(self.channel.close)
            ours.setblocking(False)
            # Nothing is written to it. The child is killed when the other end is closed.
            lifeline, own_end = os.pipe()
            theirs.callback(os.close, lifeline)
            stack.callback(os.close, own_end)
            passed = (socket_of_child.fileno(), lifeline)
            # Blocked until the child ignores them: an operator's Ctrl-C is sent to every process of the terminal's group, and
            # systemd sends SIGTERM, or SIGHUP, to every process of the service. The parent decides when a child ends.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                process = subprocess.Popen(
                    # -P, because a module in the working directory must not replace one of the server.
                    [sys.executable, "-P", "-m", module, ",".join(map(str, passed)), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(*passed, *inherited),
                    env={**os.environ, **(variables or {})},
                    process_group=0 if own_group else None,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self.pid, self._process = process.pid, process
            owned = stack.pop_all()
        self._finalizer = weakref.finalize(self, _end, process, own_group, owned)
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            self.reap()
            raise
        owned.callback(os.close, self.pidfd)

    def send(self, kind: str, fields: Mapping[str, Any], content: bytes = b"") -> None:
        """Send a message, at once or later. A child that reads nothing is killed when too many bytes wait for it."""
        try:
            self.channel.send(kind, fields, content)
            if self.channel.unsent > _MAX_UNSENT_BYTES + self.channel.max_content:
                raise MessageError(f"{self.channel.unsent} bytes wait for it")
        except MessageError as error:
            _log.error("process %d cannot be sent messages and is killed: %s", self.pid, error)
            self.kill()

    def next_message(self, timeout: float | None = None, wake_fd: int | None = None) -> Message | None:
        """Wait for the next message, and send what waits meanwhile. Return None if `wake_fd` is readable.

        TimeoutError after `timeout` seconds; ChildEnded, or MessageError if it has sent what is no message.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := self.channel.take()) is None:
            poll = select.poll()
            poll.register(self.channel, select.POLLIN | (select.POLLOUT if self.channel.unsent else 0))
            # A process that the child has forked can hold the channel open.
            poll.register(self.pidfd, select.POLLIN)
            if wake_fd is not None:
                poll.register(wake_fd, select.POLLIN)
            ready = dict(poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3))
            if not ready:
                raise TimeoutError
            events = ready.get(self.channel.fileno(), 0)
            if events & select.POLLOUT:
                self.channel.flush()
            if (not self.channel.fill()) if events & ~select.POLLOUT else self.pidfd in ready:
                raise ChildEnded
            if wake_fd in ready:
                return None
        return message

    def kill(self) -> None:
        """Kill the process, and with it those of its group if it has one. Idempotent."""
        with self._lock:
            if not self._reaped:
                _kill(self.pid, self._own_group)

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the process to end. Return whether it has."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(timeout * 1e3))

    def end(self, timeout: float) -> ExitStatus:
        """Let the process end by closing the channel, kill it after `timeout` seconds, and `reap` it."""
        self.channel.close()
        self.wait(timeout)
        return self.reap()

    def reap(self) -> ExitStatus:
        """Kill the process if it lives, wait for it, release everything, and return how it ended."""
        with self._lock:
            self._reaped = True
        self._finalizer()
        # At the end of the interpreter, another thread may be running the finalizer.
        return ExitStatus.of(self._process.wait())

    def abandon(self) -> None:
        """Leave a killed process that does not end, for instance because it hangs in a driver, to the kernel."""
        self._finalizer.detach()


def _kill(pid: int, group: bool) -> None:
    with suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes], group: bool, files: ExitStack) -> None:
    if process.returncode is None:
        _kill(process.pid, group)
        process.wait()
    files.close()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The fields that a function in a child has sent, and how the child ended: by a kill if it was `late`."""

    sent: Sequence[dict[str, Any]]
    status: ExitStatus
    late: bool


def run_in_child(
    function: Callable[[_T, Callable[[Mapping[str, Any]], None]], None],
    argument: _T,
    first_seconds: float,
    next_seconds: float,
    on_start: Callable[[Child], None] = lambda child: None,
) -> Outcome:
    """Run `function(argument, send)` in a child, and return what it has sent until its end, by which it may be killed.

    The child may take `first_seconds` until it sends something, then `next_seconds` for each other step and for its end.
    Both must be picklable, the function by its name. The child prints nothing. `on_start` gets it, to kill it.
    """
    child = Child(_FUNCTION_MODULE, own_group=True, quiet=True, max_content=MAX_ARGUMENT_BYTES)
    sent: list[dict[str, Any]] = []
    late = False
    try:
        on_start(child)
        child.send("run", {}, pickle.dumps((function, argument)))
        while True:
            message = child.next_message(next_seconds if sent else first_seconds)
            assert message is not None
            sent.append(message.fields)
    except ChildEnded:
        late = not child.wait(next_seconds)
    except TimeoutError:
        late = True
    except MessageError as error:
        _log.error("process %d has sent what is no message, and is killed (bug): %s", child.pid, error)
    finally:
        status = child.reap()
    return Outcome(sent, status, late)


class RestartDelay:
    """Delays before one process is started again: none after a long run, 0.1 s after a short one that served.

    A process that ended before it served cannot start at present. Its delays double from 0.1 s to 10 s. The first short
    run after a long one is not delayed, because its end may have nothing to do with its start.
    """

    def __init__(self) -> None:
        self._next = 0.0

    def after(self, lived: float, *, served: bool) -> float:
        """Return the delay after a run of `lived` seconds. `served` is whether the process was ready at its end."""
        if lived >= _RECOVERED_SECONDS:
            self._next = 0.0
        elif served:
            self._next = min(self._next, _FIRST_DELAY)
        delay = self._next
        self._next = min(max(2 * delay, _FIRST_DELAY), _LONGEST_DELAY)
        return delay
