"""Questions that the server processes ask each other, over Unix sockets in the supervisor's private folder."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tensorferry.batcher.supervision import RestartBackoff
from tensorferry.server.processes.messages import Channel, MessageError
from tensorferry.server.system.threads import ThreadKind, new_thread

_log = logging.getLogger("tensorferry.server")

# How long a process waits for the others, which may be ending or busy.
_ANSWER_SECONDS = 5.0
_MOST_BYTES = 256 << 20
_MOST_WAITING = 1024


class Peers:
    """The processes of a server, as one of them sees them. Call `on` for each kind of question, then `start`.

    `ask` is thread-safe. Questions and answers are bytes. `index` is the number of this process.
    """

    def __init__(self, folder: Path, index: int, count: int) -> None:
        self.index = index
        self._own = folder / f"peer-{index}"
        self._others = [folder / f"peer-{other}" for other in range(count) if other != index]
        self._answers: dict[str, Callable[[bytes], bytes]] = {}

    def on(self, kind: str, answer: Callable[[bytes], bytes]) -> None:
        """Answer questions of a kind by this function of their content."""
        self._answers[kind] = answer

    def start(self) -> None:
        """Answer the others from now on, on a thread."""
        # That of the process before, which was killed.
        self._own.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(self._own))
        # Room for the questions of others while this process is busy.
        listening.listen(_MOST_WAITING)

        pauses = RestartBackoff()

        def run() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    # Clients have taken every file that the process may open.
                    pauses.wait()
                    continue
                try:
                    self._serve(connection)
                except Exception as error:
                    # The other process has ended, or asks for a model that this one does not have.
                    _log.debug("a question of another server process is not answered: %r", error)

        new_thread("peers", run, ThreadKind.RESTARTED).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_ANSWER_SECONDS)
            channel = Channel(connection, _MOST_BYTES)
            if (question := channel.receive()) is not None:
                channel.send("answer", {}, self._answers[question.kind](question.content))

    def ask(self, kind: str, content: bytes = b"") -> list[bytes]:
        """Return the answers of all processes, this one's first. A process that does not answer is left out."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        asked: list[socket.socket] = []
        with ExitStack() as connections:
            # All are asked first, so that one that hangs does not delay the others.
            for other in self._others:
                connection = connections.enter_context(socket.socket(socket.AF_UNIX))
                try:
                    connection.settimeout(_ANSWER_SECONDS)
                    connection.connect(str(other))
                    Channel(connection, _MOST_BYTES).send(kind, {}, content)
                except (OSError, MessageError) as error:
                    _log.debug("a server process cannot be asked about %s: %r", kind, error)
                else:
                    asked.append(connection)
            answers = [self._answers[kind](content)]
            for connection in asked:
                try:
                    connection.settimeout(max(0.001, deadline - time.monotonic()))
                    if (answer := Channel(connection, _MOST_BYTES).receive()) is not None:
                        answers.append(answer.content)
                except (OSError, MessageError) as error:
                    # It has ended, or hangs.
                    _log.debug("a server process did not answer about %s: %r", kind, error)
        return answers
