"""What the engine's metrics show of a front-end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from tensorferry.server.link import FrontEndLink
from tensorferry.server.link_messages import Gauge
from tensorferry.server.status import StatusCode


class FrontEndReport:
    """Refused requests and gauges of a front-end, in the counters of its link to the engine. Thread-safe.

    `value_of` returns the present value of a gauge. It is only called while a link is attached, and without a lock.
    """

    def __init__(self, value_of: Callable[[Gauge], int] = lambda gauge: 0) -> None:
        self._value_of = value_of
        # Guards the fields below and the counters of the link. Nothing is called while it is held. Only `gauge_changed` reads
        # _link without it: `attach` writes the gauges that change meanwhile.
        self._lock = threading.Lock()
        self._link: FrontEndLink | None = None
        # Requests that were refused while there was no engine to report them to, by status code.
        self._unreported: Counter[StatusCode] = Counter()

    def attach(self, link: FrontEndLink) -> None:
        """Report to the engine at the other end of this link from now on. Idempotent."""
        with self._lock:
            self._link = link
            for code, count in self._unreported.items():
                link.counters[code.value[0]] += count
            self._unreported.clear()
        for gauge in Gauge:
            self.gauge_changed(gauge)

    def detach(self) -> None:
        """Keep refused requests for the next engine; this one is gone."""
        with self._lock:
            self._link = None

    def count_refused(self, code: StatusCode) -> None:
        """Count a request that was refused before it reached the engine."""
        with self._lock:
            if self._link is None:
                self._unreported[code] += 1
            else:
                self._link.counters[code.value[0]] += 1

    def gauge_changed(self, gauge: Gauge) -> None:
        """Report the present value of a gauge."""
        reported: int | None = None
        # Threads may write their values in the wrong order. A thread that wrote an old value reads a newer one afterwards, and
        # writes that.
        while self._link is not None and (value := self._value_of(gauge)) != reported:
            with self._lock:
                if self._link is not None:
                    self._link.counters[gauge] = value
            reported = value
