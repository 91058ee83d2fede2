"""Trials of suspects: requests that were in a batch when the engine died, or were lost twice.

One of them may have ended the engine. Each runs again alone, in an engine of its own. The one that ends that engine too is
the cause: it gets INTERNAL, and its bytes are refused for a while. So all others get their answers, at the price of one
more dead engine. Runs by halves would need one for each half that has the cause in it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from tensorferry.server.errors import ModelFailedError
from tensorferry.server.front_end.engine_connection import lost_error, reply_of
from tensorferry.server.front_end.remote_call import HeldRequest, HeldRequests
from tensorferry.server.link import FrontEndLink, LinkBroken, LinkClosed
from tensorferry.server.refused_requests import (
    REFUSED,
    REFUSED_SECONDS,
    RefusedRequests,
    digest_of,
)
from tensorferry.server.threads import ThreadKind, new_thread

_log = logging.getLogger("tensorferry.server")


class Trials:
    """The suspects of one front-end. `report` sends a message to the supervisor.

    The supervisor learns how many suspects there are, and starts an engine for them. `connect`, `begin`, `end` and `close`
    are called by one thread, the others by any.
    """

    def __init__(self, report: Callable[..., None]) -> None:
        self._refused = RefusedRequests()
        self._report = report
        self._suspects = HeldRequests()
        # Held while the number of suspects is read and reported, so that the last report has the last number.
        self._report_lock = threading.Lock()
        self._link: FrontEndLink | None = None
        # Whether the engine died, if its link is closed.
        self._died = False
        self._thread: threading.Thread | None = None

    def refuses(self, message: bytes) -> bool:
        """Return whether a request has ended an engine lately."""
        return self._refused.has(message)

    def refuse(self, digest: str, until: float) -> None:
        """Refuse a request that has ended an engine for another front-end."""
        self._refused.add(digest, until)

    def hold(self, requests: Sequence[HeldRequest]) -> None:
        """Keep requests until they are tried."""
        if requests:
            self._suspects.hold(requests)
            self._report_count()

    def connect(self, link: FrontEndLink) -> None:
        """Take the link to an engine for trials. It still loads its models."""
        self._drop_link()
        self._died = False
        self._link = link

    def begin(self) -> None:
        """Run the suspects: the engine is ready."""
        if self._link is not None and self._thread is None:
            self._thread = new_thread("trials", partial(self._run, self._link), ThreadKind.ESSENTIAL)
            self._thread.start()

    def end(self, *, died: bool) -> None:
        """Leave the engine: it died, or another front-end gets it. Suspects that are left are tried in the next one."""
        loaded = self._thread is not None
        self._died = died
        self._drop_link()
        if died and not loaded:
            # Another one would probably fail to load, too.
            self._suspects.fail_all(lost_error)
        self._report_count()

    def close(self) -> None:
        """Answer the suspects that were not tried."""
        self._drop_link()
        self._suspects.fail_all(lost_error)

    def _drop_link(self) -> None:
        link, self._link = self._link, None
        thread, self._thread = self._thread, None
        if link is not None:
            link.close()
            if thread is not None:
                thread.join()
            link.release()

    def _report_count(self) -> None:
        with self._report_lock:
            self._report("suspects", count=len(self._suspects))

    def _run(self, link: FrontEndLink) -> None:
        while (suspect := self._next()) is not None:
            try:
                suspect.call.submit(link, suspect.message, suspect.deadline, suspect.extra)
            except LinkClosed:
                # The engine ended before it had this one.
                self._suspects.hold([suspect])
                return
            link.flush()
            if not _answered(link):
                if self._died:
                    self._refuse(suspect)
                else:
                    # The link is broken, or the front-end ends: no other engine comes for the rest.
                    suspect.fail(lost_error())
                    self._suspects.fail_all(lost_error)
                    self._report_count()
                return

    def _next(self) -> HeldRequest | None:
        """Return the next suspect; None, and report that, if there is none."""
        while (suspect := self._suspects.take()) is None:
            with self._report_lock:
                if not self._suspects:
                    self._report("suspects", count=0)
                    return None
        return suspect

    def _refuse(self, suspect: HeldRequest) -> None:
        digest, until = digest_of(suspect.message), time.monotonic() + REFUSED_SECONDS
        _log.error(
            "request %r of %d bytes (hash %s) ended the engine that ran it alone: it gets INTERNAL, and the same bytes are "
            "refused for %g s",
            suspect.request_id,
            len(suspect.message),
            digest,
            REFUSED_SECONDS,
        )
        self._refused.add(digest, until)
        self._report("refuse", digest=digest, until=until)
        suspect.fail(ModelFailedError(REFUSED))


def _answered(link: FrontEndLink) -> bool:
    """Wait for the response to the one request in flight, and complete it. Return False if the engine died instead."""
    try:
        responses = link.receive()
    except LinkBroken as error:
        _log.error("the engine for trials breaks the rules of the link, which is a bug: %s", error)
        return False
    for _, code, payload, call in responses:
        call.complete(reply_of(code, payload))
    return bool(responses)
