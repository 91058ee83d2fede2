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
from typing import Any, TypeAlias

from tensorferry.server.transport.lane.tcp_cork import TcpCork

_log = logging.getLogger("tensorferry.server")

# Much longer than the polling thread needs to take a handover, unless it has ended.
_HANDOVER_SECONDS = 1.0
# The expected number of refusals between two pauses in an overload.
_COALESCED_REFUSALS = 32
# Writing 32 small responses takes about a millisecond, which limits the delay of the first.
_MAX_CORKED_RESPONSES = 32
# A larger response fills packets of its own.
_LARGE_BYTES = 16 << 10

# The size of a response, a function that sends it by starting an operation of its call, and the arguments.
Send: TypeAlias = tuple[int, Callable[..., object], tuple[Any, ...]]


class _ThisThread(threading.local):
    """What a thread does: whether it polls, and its responses between `begin` and `end`, None outside."""

    polls = False
    collected: list[Send] | None = None
    # How many batches have begun and not ended.
    depth = 0


class ResponseBatcher:
    """The batcher's `ResponseBurstHook`. Thread-safe, except for the methods of the polling thread.

    Between `begin` and `end` a call adds its response to `this_thread.collected`, otherwise it sends it itself.
    """

    def __init__(self) -> None:
        self._cork = TcpCork()
        self.this_thread = _ThisThread()
        # Whether some thread polls.
        self._polled = False
        # Ends a pause.
        self._wake = threading.Event()
        # Responses that workers have handed over. The thread that removes a handover sends it.
        self.handovers: deque[_Handover] = deque()

    def serve(self, port: int) -> None:
        """Cork the connections of this port from now on."""
        self._cork.serve(port)

    def bind_polling_thread(self) -> None:
        """Make the calling thread the polling thread."""
        self.this_thread.polls = self._polled = True

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
        """Begin a batch of responses on this thread. One that begins within another is sent with that one."""
        this_thread = self.this_thread
        if not this_thread.depth:
            this_thread.collected = []
        this_thread.depth += 1

    def end(self) -> None:
        """Send the batch; return when every response was sent."""
        this_thread = self.this_thread
        this_thread.depth -= 1
        if this_thread.depth:
            return
        responses, this_thread.collected = this_thread.collected or [], None
        if this_thread.polls or len(responses) < 2 or not self._polled:
            self._send(responses)
            return
        handover = _Handover(responses[1:])
        # Before the first response is sent, because its event makes the polling thread look for handovers.
        self.handovers.append(handover)
        self._wake.set()
        self._send(responses[:1])
        while not handover.sent.acquire(timeout=_HANDOVER_SECONDS):
            try:
                self.handovers.remove(handover)
            except ValueError:
                # It is being sent.
                continue
            # The server has stopped, and no thread polls.
            self._send(handover.responses)
            return

    def flush(self) -> None:
        """Send what workers have handed over. On the polling thread, after every operation."""
        while self.handovers:
            try:
                handover = self.handovers.popleft()
            except IndexError:
                return
            self._send(handover.responses)
            handover.sent.release()

    def _send(self, responses: Sequence[Send]) -> None:
        cork = self._cork if self.this_thread.polls else None
        if cork is not None:
            cork.begin(len(responses))
        for number, (nbytes, send, arguments) in enumerate(responses, 1):
            try:
                send(*arguments)
            except BaseException:
                # The other responses of the batch must still be sent.
                _log.exception("a response could not be sent; this is a bug in tensorferry.server")
                continue
            if cork is not None and cork.corked:
                if nbytes > _LARGE_BYTES:
                    cork.end()
                elif number % _MAX_CORKED_RESPONSES == 0 and number < len(responses):
                    cork.flush()
        if cork is not None:
            cork.end()


class _Handover:
    """Responses that a worker hands to the polling thread."""

    __slots__ = ("responses", "sent")

    def __init__(self, responses: Sequence[Send]) -> None:
        self.responses = responses
        # Released once they are sent. A plain lock, because a semaphore costs as much as sending a response.
        self.sent = threading.Lock()
        self.sent.acquire()
