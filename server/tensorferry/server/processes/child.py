"""Server process as the supervisor sees it: its start, its control channel, and how it ended."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorferry.server.processes.control import ControlChannel, ControlError, Message

_log = logging.getLogger("tensorferry.server")

# Messages that replace an older one that was not sent yet.
_LATEST_ONLY = frozenset({"ping", "processes"})
# A child that has not read this many messages, beside those in the socket's buffer, does not work.
_MAX_UNSENT = 256

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a child ended. `signal` is 0 if it exited by itself, or could not be started."""

    description: str
    signal: int = 0

    @property
    def clean(self) -> bool:
        """Whether it exited with status 0."""
        return self.description == "exit status 0"

    @classmethod
    def of(cls, status: int) -> Ending:
        """Return the ending with the exit status, or the negative number of the signal."""
        if status >= 0:
            return cls(f"exit status {status}")
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return cls(f"killed by {name}", -status)


class Child:
    """A server process. Not thread-safe.

    `send` never waits: messages that the child does not read at once are queued, and `flush` sends them when the
    channel is writable. OSError of the constructor if the process cannot be started. The process inherits `inherited`,
    under the same numbers, and `variables` beside the environment's.
    """

    def __init__(
        self,
        module: str,
        argv: Sequence[str],
        *,
        inherited: Sequence[int] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.channel, theirs = ControlChannel.pair()
        self.channel.set_blocking(False)
        self._unsent: deque[Message] = deque()
        self._sendable = True
        # Blocked until the child ignores them: an operator's Ctrl-C is sent to every process of the terminal's group, and
        # systemd sends SIGTERM to every process of the service. The supervisor decides when a child ends.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            with theirs:
                fd = theirs.fileno()
                # -P, because a module in the working directory must not replace one of the server.
                command = [sys.executable, "-P", "-m", module, str(fd), *argv]
                environment = {**os.environ, **(variables or {})}
                self._process = subprocess.Popen(command, pass_fds=(fd, *inherited), env=environment)
        except BaseException:
            self.channel.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.pid = self._process.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            self.channel.close()
            raise

    def send(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Send a message, at once or later. A child that reads nothing is killed when too many messages wait for it."""
        if not self._sendable:
            return
        if kind in _LATEST_ONLY:
            self._unsent = deque(unsent for unsent in self._unsent if unsent.kind != kind)
        self._unsent.append(Message(kind, dict(fields)))
        self.flush()
        if len(self._unsent) > _MAX_UNSENT:
            self._give_up(f"{len(self._unsent)} messages wait for it")

    def flush(self) -> None:
        """Send what the channel accepts without waiting."""
        while self._unsent:
            unsent = self._unsent[0]
            try:
                self.channel.send(unsent.kind, unsent.fields)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                # The child is about to end.
                self._stop_sending()
                return
            except (OSError, ControlError) as error:
                self._give_up(str(error))
                return
            self._unsent.popleft()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` must be called when the channel is writable."""
        return bool(self._unsent)

    def receive(self) -> Message | None:
        """Return the next message; None at the end of file. BlockingIOError if there is none yet."""
        return self.channel.receive()

    def kill(self) -> None:
        """Kill the process, unless it has ended. Idempotent."""
        if self._process.returncode is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the process to end. Return whether it has."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(timeout * 1e3))

    def reap(self) -> Ending:
        """Return how the process ended, and release everything. Call this when `pidfd` is readable."""
        ending = Ending.of(self._process.wait())
        os.close(self.pidfd)
        self.close_channel()
        return ending

    def close_channel(self) -> None:
        """Close the control channel; the child ends if it works. Idempotent."""
        self._stop_sending()
        self.channel.close()

    def _give_up(self, reason: str) -> None:
        _log.error("process %d cannot be sent messages and is killed: %s", self.pid, reason)
        self.kill()
        self._stop_sending()

    def _stop_sending(self) -> None:
        self._sendable = False
        self._unsent.clear()
