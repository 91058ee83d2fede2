"""The answers of one batch leave together: from the thread that polls, and to each client as one.

A worker that sends answers gives the interpreter away for each of them, and the thread that polls, which
hears that they have left, takes it: the two change places twice for every answer, which costs a model of a
few milliseconds a twentieth of its throughput. So the worker sends one answer and leaves the others to the
thread that polls: what tells that thread that the one has left is also what tells it of the others. The
worker waits meanwhile, so that its batch is answered when it goes on, as ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from tensorferry.server.transport.lane.tcp_cork import TcpCork

_log = logging.getLogger("tensorferry.server")

# Long after an answer has left, if the thread that polls still does.
_PATIENCE_SECONDS = 1.0
# Calls that are refused in an overload come in tens.
_MANY = 32


class ResponseBatcher:
    """What a batcher is told of its answers (`ResponseBurstHook`). Thread-safe, but for what is said of a method.

    An answer is given as a function that starts an operation of its call, always, and must not raise.
    """

    def __init__(self) -> None:
        self._cork = TcpCork()
        # The thread that polls, once it does.
        self._polling = 0
        # What ends a rest.
        self._wake = threading.Event()
        # Of each other thread, the answers that it gives; only between `begin` and `end`.
        self._local = threading.local()
        # What workers have left to the thread that polls; whoever takes one out of it sends it.
        self.handovers: deque[_Handover] = deque()

    def serve(self, port: int) -> None:
        """From now on for the connections to this port."""
        self._cork.serve(port)

    def bind_polling_thread(self) -> None:
        """The calling thread is the one that polls."""
        self._polling = threading.get_ident()
        # So that what is asked for each answer is there.
        self._local.batch = None

    @property
    def is_polling(self) -> bool:
        """Whether the calling thread is the one that polls."""
        return threading.get_ident() == self._polling

    def begin_coalescing(self) -> None:
        """What is written until the next `rest` may leave together: there is much of it. On the thread that polls."""
        self._cork.begin(_MANY)

    def pause(self, seconds: float) -> None:
        """Waits for so long, and sends meanwhile what workers hand over. On the thread that polls."""
        self._cork.end()
        until = time.monotonic() + seconds
        while True:
            self._wake.clear()
            self.flush()
            if not self._wake.wait(until - time.monotonic()):
                return

    def begin(self, count: int) -> None:
        """So many answers follow on this thread."""
        if threading.get_ident() == self._polling:
            self._cork.begin(count)
        elif self._polling:
            self._local.batch = []

    def send(self, send: Callable[[], None]) -> None:
        """An answer is to be sent: now, or with the others of its batch."""
        batch: list[Callable[[], None]] | None = getattr(self._local, "batch", None)
        if batch is None:
            send()
        else:
            batch.append(send)

    def sent(self, nbytes: int) -> None:
        """An answer of this size was handed to core, on any thread."""
        # First what is seldom so: another thread may see it a moment too late, and then asks in vain.
        if self._cork.corked and threading.get_ident() == self._polling:
            self._cork.written(nbytes)

    def end(self) -> None:
        """They are given. Returns when they are sent."""
        if threading.get_ident() == self._polling:
            self._cork.end()
            return
        batch: Sequence[Callable[[], None]] = getattr(self._local, "batch", None) or ()
        self._local.batch = None
        if len(batch) < 2:
            _send(batch)
            return
        handover = _Handover(batch[1:])
        # First: it is looked for when the one has left.
        self.handovers.append(handover)
        self._wake.set()
        _send(batch[:1])
        while not handover.sent.acquire(timeout=_PATIENCE_SECONDS):
            try:
                self.handovers.remove(handover)
            except ValueError:
                # It is being sent.
                continue
            # Nobody polls any more: the server has stopped.
            handover.send()

    def flush(self) -> None:
        """Sends what workers have handed over. On the thread that polls, whenever an operation has ended."""
        while self.handovers:
            try:
                handover = self.handovers.popleft()
            except IndexError:
                return
            self._cork.begin(len(handover.sends))
            handover.send()
            self._cork.end()


class _Handover:
    """Answers that one thread leaves to another."""

    __slots__ = ("sends", "sent")

    def __init__(self, sends: Sequence[Callable[[], None]]) -> None:
        self.sends = sends
        self.sent = threading.Semaphore(0)

    def send(self) -> None:
        _send(self.sends)
        self.sent.release()


def _send(sends: Sequence[Callable[[], None]]) -> None:
    for send in sends:
        try:
            send()
        except BaseException:
            # Its neighbours wait for theirs.
            _log.exception("an answer could not be sent; this is a bug in tensorferry.server")
