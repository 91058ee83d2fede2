"""Requests that may end the process: what runs is noted in a page for the supervisor, and suspects run alone.

A server of one process has none of this.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from tensorferry.batcher import Request, Tensor
from tensorferry.server.errors import LimitError, ModelFailedError, SuspectError
from tensorferry.server.inference.requests.request_templates import Match
from tensorferry.server.inference.suspects.waiting_suspects import WaitingSuspects
from tensorferry.server.processes.running_page import Running, RunningPage
from tensorferry.server.processes.suspect_requests import REFUSED, RefusedRequests, TrialLock

_log = logging.getLogger("tensorferry.server")

_T = TypeVar("_T")

# Bytes, or strings, of a tensor that a sample has from its beginning and from its end.
_SAMPLE = 128
_SAMPLE_STRINGS = 4
# When a suspect that cannot be tried yet may be sent again: a process is started in about this time.
_RETRY_SECONDS = 1.0


class WatchedRequest:
    """A request, from its acceptance to its answer and to the end of its runs. It is noted in the page from its first run on.

    A request that was cancelled may still run. `alone` says that it runs in a batch of its own. `over` is called at the end,
    with whether it ran. Thread-safe.
    """

    __slots__ = (
        "_digest",
        "_ended",
        "_lock",
        "_match",
        "_over",
        "_owner",
        "_page",
        "_place",
        "_runs",
        "alone",
    )

    def __init__(
        self,
        page: RunningPage,
        match: Match,
        owner: bytes,
        digest: bytes = b"",
        over: Callable[[bool], None] | None = None,
    ) -> None:
        self._page = page
        self._owner = owner
        # The hash of the whole request, if it runs alone.
        self._digest = digest
        self._over = over
        self.alone = bool(digest)
        # Guards the fields below. The page is written while it is held, and nothing else is called.
        self._lock = threading.Lock()
        # None at the end.
        self._match: Match | None = match
        self._runs = 0
        # None before the first run.
        self._place: int | None = None
        self._ended = False

    def begin(self) -> None:
        """Note that a batch with it runs. Steps of a model may begin it on several threads."""
        with self._lock:
            self._runs += 1
            if self._place is None and self._match is not None:
                digest = self._digest or digest_of(self._match, whole=False)
                self._place = self._page.begin(Running(self._owner, digest, self.alone))

    def run_ended(self) -> None:
        """End what `begin` began."""
        with self._lock:
            self._runs -= 1
            over = self._finish_locked()
        self._call(over)

    def end(self) -> None:
        """End the request, which is answered, or was not accepted."""
        with self._lock:
            self._ended = True
            over = self._finish_locked()
        self._call(over)

    def _finish_locked(self) -> Callable[[bool], None] | None:
        """End the note, if neither the request nor a run of it goes on. Return what is to be called."""
        if not self._ended or self._runs:
            return None
        # The tensors are released with the request.
        self._match = None
        if self._place is not None:
            self._page.end(self._place)
            # Once.
            self._place = 0
        over, self._over = self._over, None
        return over

    def _call(self, over: Callable[[bool], None] | None) -> None:
        if over is not None:
            over(self._place is not None)

    def completion(self, complete: Callable[[_T], None]) -> Callable[[_T], None]:
        """Return a completion that ends the request and calls `complete`."""

        def completed(reply: _T) -> None:
            self.end()
            complete(reply)

        return completed


class CrashWatch:
    """What a server process knows of requests that ended another one. Thread-safe.

    A suspect that ran alone without harm is none any more. Those that cannot run yet are in `waiting`.
    """

    def __init__(
        self, page: RunningPage, trial: TrialLock, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.page = page
        self.waiting = WaitingSuspects(trial)
        self._trial = trial
        self._now = clock
        self._refused = RefusedRequests(clock)
        # Hashes of samples and of clients, with the time until which they count. Replaced as a whole.
        self._suspects: Mapping[bytes, float] = {}
        self._clients: Mapping[bytes, float] = {}
        # Until when any request is suspect or refused. Later ones are not hashed.
        self._hashes_until = 0.0
        # Guards writes of the three.
        self._lock = threading.Lock()

    def on_findings(self, fields: Mapping[str, Any]) -> None:
        """Take the fields of `Findings`."""
        until, client = fields["until"], fields["client"]
        with self._lock:
            now = self._now()
            self._hashes_until = max(self._hashes_until, until)
            suspects = {mark: until for mark, until in self._suspects.items() if until > now}
            suspects.update((bytes.fromhex(mark), until) for mark in fields["suspects"])
            self._suspects = suspects
            if client:
                self._clients = {**self._clients, bytes.fromhex(client): fields["client_until"]}
        if fields["refused"]:
            self._refused.add(fields["refused"], until)

    def admit(self, match: Match, client: str) -> WatchedRequest:
        """Return the request to watch. ModelFailedError, LimitError or SuspectError if it is refused."""
        model = match[0].model.name
        owner = owner_of(client, model)
        if self._clients:
            self._check_client(owner, client, model)
        if self._hashes_until <= self._now():
            return WatchedRequest(self.page, match, owner)
        whole, mark = digest_of(match, whole=True), digest_of(match, whole=False)
        if self._refused.has_digest(whole.hex()):
            raise ModelFailedError(REFUSED)
        if self._suspects.get(mark, 0.0) <= self._now():
            return WatchedRequest(self.page, match, owner)
        if not self._trial.begin():
            raise SuspectError(
                "an equal request may have ended a server process, so this one is to run alone, and cannot yet: another one is "
                "tried, or a process is being started",
                _RETRY_SECONDS,
                self._suspects.get(mark, 0.0),
            )
        return WatchedRequest(self.page, match, owner, whole, partial(self._tried, mark))

    def _check_client(self, owner: bytes, client: str, model: str) -> None:
        left = self._clients.get(owner, 0.0) - self._now()
        if left > 0:
            _log.warning(
                "a request of client %r to model %s is refused: its requests ended server processes",
                client,
                model,
            )
            raise LimitError(
                f"requests of this client to model {model!r} ended server processes: send no more for {left:.0f} s, and "
                "report the model's crash"
            )

    def _tried(self, mark: bytes, ran: bool) -> None:
        """End a trial, and clear the suspect if it ran without harm."""
        if ran:
            with self._lock:
                self._suspects = {one: until for one, until in self._suspects.items() if one != mark}
        self._trial.end()


def note_running(batch: Iterable[Request]) -> Callable[[], None]:
    """Note that these requests run, and return what ends that; the batchers call this before each batch.

    A request that a model's function made is not noted, because the request for which it runs is.
    """
    watched = [
        request.owner.watched
        for request in batch
        if request.owner is not None and request.owner.watched is not None
    ]
    for request in watched:
        request.begin()

    def ended() -> None:
        for request in watched:
            request.run_ended()

    return ended


def owner_of(client: str, model: str) -> bytes:
    """Return the hash of a client and a model; zeros for a client without a name."""
    return hashlib.blake2b(f"{client}\0{model}".encode(), digest_size=8).digest() if client else bytes(8)


def digest_of(match: Match, *, whole: bool) -> bytes:
    """Return the hash of a request's model, parameters and inputs, or of a sample of these, but not of its id."""
    template, tensors = match[0], match[3]
    digest = hashlib.blake2b(digest_size=16)
    model, types = template.model, [tensor.dtype.str for tensor in tensors]
    parameters = sorted(template.custom.items())
    described = (model.name, model.version, template.names, template.shapes, types, parameters)
    digest.update(repr(described).encode(errors="surrogatepass"))
    for tensor in tensors:
        for part in _parts(tensor, whole):
            # With the length, so that parts cannot be divided in another way.
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def _parts(tensor: Tensor, whole: bool) -> Sequence[bytes | memoryview]:
    if tensor.dtype.hasobject:
        elements = tensor.data.ravel().tolist()
        if not whole:
            elements = [*elements[:_SAMPLE_STRINGS], *elements[-_SAMPLE_STRINGS:]]
        return [element if isinstance(element, bytes) else str(element).encode() for element in elements]
    data = memoryview(tensor.data).cast("B")
    return [data] if whole else [data[:_SAMPLE], data[-_SAMPLE:], len(data).to_bytes(8, "little")]
