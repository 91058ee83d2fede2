"""The engine's thread: it reads the links of all front-ends and runs short batches itself."""

from __future__ import annotations

import logging
import math
import os
import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from queue import SimpleQueue

from tensorferry.server.engine.front_end_port import FrontEndPort, ResponseBursts
from tensorferry.server.inference.interface import MAX_INLINE_SECONDS, InlineRunner
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.link import EngineLink, LinkBroken, LinkError, LinkFiles
from tensorferry.server.link_messages import FAILED, Gauge, encode_failure
from tensorferry.server.status import Status, StatusCode
from tensorferry.server.threads import ThreadKind, new_thread

_log = logging.getLogger("tensorferry.server")

# Answer to a request whose response finds no room in the link's memory.
_NO_ROOM = (
    FAILED,
    encode_failure(
        Status(
            StatusCode.RESOURCE_EXHAUSTED,
            "too many large responses wait for this front-end; retry later",
            0.1,
        ),
        "",
        ("", ""),
    ),
)


class EngineLoop:
    """Serves the links of front-ends on one thread. `connect`, `disconnect` and `stop` may be called on any thread."""

    def __init__(
        self,
        service: InferenceService,
        bursts: ResponseBursts,
    ) -> None:
        self._service = service
        self._bursts = bursts
        # Batchers with a batch that the loop's thread shall run, and when, in seconds of the monotonic clock.
        self._run_at: dict[InlineRunner, float] = {}
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        # Guards _closed, _refused and writes of _ports, and keeps _wake_fd open while it is written to.
        self._lock = threading.Lock()
        # What front-ends without a link any more had refused.
        self._refused: Counter[StatusCode] = Counter()
        self._closed = False
        self._stopping = False
        # The ports by front-end. Changed by the loop's thread only.
        self._ports: dict[int, FrontEndPort] = {}
        self._thread = new_thread("engine", self._run, ThreadKind.ESSENTIAL)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def connect(self, front_end: int, files: LinkFiles, broken: Callable[[str], None]) -> None:
        """Serve a front-end over this link, instead of the link that it had.

        If the front-end breaks the rules of the link, the link is closed, and `broken` is called with the reason on the
        loop's thread.
        """
        self._order(lambda: self._connect(front_end, files, broken))

    def disconnect(self, front_end: int) -> None:
        """Cancel the requests of a front-end that has ended."""
        self._order(lambda: self._disconnect(front_end))

    def stop(self) -> None:
        """Close every link and end the thread. Idempotent."""

        def stop() -> None:
            self._stopping = True

        self._order(stop)
        self._thread.join()
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._wake_fd)

    def refused(self) -> Mapping[StatusCode, int]:
        """Return the requests that front-ends refused themselves, by status code."""
        with self._lock:
            refused = self._refused.copy()
            for port in self._ports.values():
                refused.update(port.refused())
        return refused

    def gauges(self) -> Mapping[Gauge, int]:
        """Return the sum of what the present front-ends count."""
        with self._lock:
            gauges = [port.gauges() for port in self._ports.values()]
        return {gauge: sum(each[gauge] for each in gauges) for gauge in Gauge}

    def _order(self, order: Callable[[], None]) -> None:
        with self._lock:
            if not self._closed:
                self._orders.put(order)
                os.eventfd_write(self._wake_fd, 1)

    def _connect(self, front_end: int, files: LinkFiles, broken: Callable[[str], None]) -> None:
        self._disconnect(front_end)
        try:
            link = EngineLink(files, no_room=_NO_ROOM)
        except LinkError as error:
            broken(str(error))
            return
        port = FrontEndPort(link, self._service, self._bursts, self._run_soon)
        with self._lock:
            self._ports[front_end] = port
        self._selector.register(port, selectors.EVENT_READ, (front_end, broken))

    def _disconnect(self, front_end: int) -> None:
        port = self._ports.get(front_end)
        if port is None:
            return
        self._selector.unregister(port)
        with self._lock:
            del self._ports[front_end]
            self._refused.update(port.refused())
        port.close()

    def _run_soon(self, batcher: InlineRunner) -> None:
        self._run_at[batcher] = 0.0

    def _run(self) -> None:
        while not self._stopping:
            next_run = min(self._run_at.values(), default=math.inf)
            wait = None if next_run == math.inf else max(0.0, next_run - time.monotonic())
            for key, _ in self._selector.select(wait):
                if key.fd == self._wake_fd:
                    self._obey()
                else:
                    self._handle(*key.data)
            now = time.monotonic()
            for batcher, when in list(self._run_at.items()):
                if when <= now:
                    again = batcher.run_inline(MAX_INLINE_SECONDS)
                    if again < math.inf:
                        self._run_at[batcher] = again
                    else:
                        del self._run_at[batcher]
        for front_end in list(self._ports):
            self._disconnect(front_end)
        self._selector.close()

    def _obey(self) -> None:
        os.eventfd_read(self._wake_fd)
        while not self._orders.empty():
            self._orders.get()()

    def _handle(self, front_end: int, broken: Callable[[str], None]) -> None:
        port = self._ports.get(front_end)
        if port is None:
            # It was disconnected by an order of this round.
            return
        try:
            port.handle()
        except LinkBroken as error:
            self._disconnect(front_end)
            broken(str(error))
