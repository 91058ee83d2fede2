"""Sending of a batch's responses together, from the polling thread.

A worker that sends responses itself releases the GIL for each one, and the polling thread takes it to handle the
send's event. The two threads then alternate twice per response, which costs a model of a few milliseconds a twentieth
of its throughput. So the worker sends one response and hands the others to the polling thread, which finds them when
it handles the event of the first. The worker waits meanwhile, so that its batch is answered when it continues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from tensorferry.server.transport.lane.tcp_cork import TcpCork

_log = logging.getLogger("tensorferry.server")

# Much longer than the polling thread needs to take a handover, unless it has ended.
_HANDOVER_SECONDS = 1.0
# The expected number of refusals between two pauses in an overload.
_COALESCED_REFUSALS = 32


class ResponseBatcher:
    """The batcher's `ResponseBurstHook`. Thread-safe, except for the methods of the polling thread.

    A response is a function that starts an operation of its call and does not raise.
    """

    def __init__(self) -> None:
        self._cork = TcpCork()
        # Identifier of the polling thread; 0 before it polls.
        self._polling = 0
        # Ends a pause.
        self._wake = threading.Event()
        # `batch`: the responses of each other thread between `begin` and `end`.
        self._local = threading.local()
        # Responses that workers have handed over. The thread that removes a handover sends it.
        self.handovers: deque[_Handover] = deque()

    def serve(self, port: int) -> None:
        """Cork the connections of this port from now on."""
        self._cork.serve(port)

    def bind_polling_thread(self) -> None:
        """Make the calling thread the polling thread."""
        self._polling = threading.get_ident()
        # Set, because `send` reads it for every response.
        self._local.batch = None

    @property
    def is_polling(self) -> bool:
        """Whether the calling thread is the polling thread."""
        return threading.get_ident() == self._polling

    def begin_coalescing(self) -> None:
        """Collect what is sent until the next `pause`, because many refusals follow. On the polling thread."""
        self._cork.begin(_COALESCED_REFUSALS)

    def pause(self, seconds: float) -> None:
        """Wait for so long, and send meanwhile what workers hand over. On the polling thread."""
        self._cork.end()
        until = time.monotonic() + seconds
        while True:
            self._wake.clear()
            self.flush()
            if not self._wake.wait(until - time.monotonic()):
                return

    def begin(self, count: int) -> None:
        """Begin a batch of `count` responses on this thread."""
        if threading.get_ident() == self._polling:
            self._cork.begin(count)
        elif self._polling:
            self._local.batch = []

    def send(self, send: Callable[[], None]) -> None:
        """Send a response: now, or with the others of its batch."""
        batch: list[Callable[[], None]] | None = getattr(self._local, "batch", None)
        if batch is None:
            send()
        else:
            batch.append(send)

    def sent(self, nbytes: int) -> None:
        """Record a response of `nbytes` bytes that was handed to core. On any thread."""
        # The rarer condition first. Another thread may read it too late, and then does nothing.
        if self._cork.corked and threading.get_ident() == self._polling:
            self._cork.written(nbytes)

    def end(self) -> None:
        """Send the batch; return when every response was sent."""
        if threading.get_ident() == self._polling:
            self._cork.end()
            return
        batch: Sequence[Callable[[], None]] = getattr(self._local, "batch", None) or ()
        self._local.batch = None
        if len(batch) < 2:
            _send(batch)
            return
        handover = _Handover(batch[1:])
        # Before the first response is sent, because its event makes the polling thread look for handovers.
        self.handovers.append(handover)
        self._wake.set()
        _send(batch[:1])
        while not handover.sent.acquire(timeout=_HANDOVER_SECONDS):
            try:
                self.handovers.remove(handover)
            except ValueError:
                # It is being sent.
                continue
            # The server has stopped, and no thread polls.
            handover.send()

    def flush(self) -> None:
        """Send what workers have handed over. On the polling thread, after every operation."""
        while self.handovers:
            try:
                handover = self.handovers.popleft()
            except IndexError:
                return
            self._cork.begin(len(handover.sends))
            handover.send()
            self._cork.end()


class _Handover:
    """Responses that a worker hands to the polling thread."""

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
            # The other responses of the batch must still be sent.
            _log.exception("a response could not be sent; this is a bug in tensorferry.server")
