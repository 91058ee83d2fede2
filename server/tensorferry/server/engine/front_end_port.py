"""The requests of one front-end, served by the engine's inference service."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from tensorferry.batcher import Request
from tensorferry.server.inference.interface import InlineRunner
from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.inference.request_origin import RequestOrigin
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.link import EngineLink, LinkBroken
from tensorferry.server.link_messages import ANSWERED, FAILED, Gauge, decode_origin, encode_failure
from tensorferry.server.status import INTERNAL_ERROR, StatusCode

_log = logging.getLogger("tensorferry.server")


class _ThisThread(threading.local):
    """The ports with responses of the batch that this thread answers; None outside of a batch."""

    ports: set[FrontEndPort] | None = None


class ResponseBursts:
    """The batcher's `ResponseBurstHook`: each front-end is woken once for its responses of a batch. Thread-safe."""

    def __init__(self) -> None:
        self._this_thread = _ThisThread()

    def begin(self, count: int) -> None:
        """Begin a batch of responses on this thread."""
        self._this_thread.ports = set()

    def end(self) -> None:
        """Wake the front-ends that have responses of the batch."""
        ports, self._this_thread.ports = self._this_thread.ports, None
        for port in ports or ():
            port.flush()

    def responded(self, port: FrontEndPort) -> None:
        """Wake a front-end, now or at the end of the batch."""
        ports = self._this_thread.ports
        if ports is None:
            port.flush()
        else:
            ports.add(port)


def mark_begun(batch: Sequence[Request]) -> None:
    """Tell the front-ends that these requests run. If the engine dies, one of them may be the cause.

    The batchers call this. A request that a model's function made has no port: the request for which it runs was marked.
    """
    tickets: dict[FrontEndPort, list[int]] = {}
    for request in batch:
        origin: RequestOrigin | None = request.owner
        if origin is not None and origin.port is not None:
            tickets.setdefault(origin.port, []).append(origin.ticket)
    for port, begun in tickets.items():
        port.mark_begun(begun)


class FrontEndPort:
    """The engine's end of the link to one front-end.

    `handle` and `close` are for the engine's one thread. Responses come on any thread.
    """

    def __init__(
        self,
        link: EngineLink,
        service: InferenceService,
        bursts: ResponseBursts,
        run_soon: Callable[[InlineRunner], None],
    ) -> None:
        self._link = link
        self._service = service
        self._bursts = bursts
        self._run_soon = run_soon
        # Requests without a response, by ticket. Each operation on the dict is atomic.
        self._served: dict[int, _ServedRequest] = {}

    def fileno(self) -> int:
        """Return the file descriptor that is readable when there is something to handle."""
        return self._link.fileno()

    def flush(self) -> None:
        """Wake the front-end if there are new responses."""
        self._link.flush()

    def refused(self) -> Mapping[StatusCode, int]:
        """Return the requests that the front-end refused itself, by status code."""
        counters = self._link.counters()
        return {code: counters[code.value[0]] for code in StatusCode if counters[code.value[0]]}

    def gauges(self) -> Mapping[Gauge, int]:
        """Return what the front-end counts at the moment."""
        counters = self._link.counters()
        return {gauge: counters[gauge] for gauge in Gauge}

    def handle(self) -> None:
        """Submit what the front-end has sent. LinkBroken if it does not keep to the link's rules."""
        taken = self._link.take()
        for ticket, message, deadline, extra in taken.submitted:
            try:
                origin = decode_origin(extra)
            except Exception as error:
                raise LinkBroken(f"no origin of a request: {extra[:100]!r} ({error!r})") from None
            self._served[ticket] = served = _ServedRequest(self, ticket)
            served.call = self._service.submit(
                message,
                deadline,
                served.complete,
                origin.metadata,
                origin.caller,
                streamed=origin.streamed,
                run_soon=self._run_soon,
                origin=RequestOrigin(self, ticket),
            )
        for ticket in taken.cancelled:
            waiting = self._served.get(ticket)
            if waiting is not None and waiting.call is not None:
                waiting.call.cancel()

    def mark_begun(self, tickets: Sequence[int]) -> None:
        """Note in the link that these requests run."""
        self._link.mark_begun(tickets)

    def respond(self, ticket: int, reply: InferenceReply) -> None:
        """Send a request's response or status."""
        del self._served[ticket]
        try:
            code, pieces = ANSWERED, reply.pieces()
        except BaseException as error:
            status = self._service.status_of(error, reply)
            code, pieces = FAILED, (encode_failure(status, reply.request_id, reply.addressed),)
        try:
            self._link.respond(ticket, code, pieces)
        except Exception:
            _log.exception("a response could not be built; this is a bug in tensorferry.server")
            failed = encode_failure(INTERNAL_ERROR, reply.request_id, reply.addressed)
            self._link.respond(ticket, FAILED, (failed,))
        self._bursts.responded(self)
        if reply.trace is not None:
            reply.trace.sent()

    def close(self) -> None:
        """Cancel every request: the front-end is gone."""
        self._link.close()
        for served in list(self._served.values()):
            if served.call is not None:
                served.call.cancel()


class _ServedRequest:
    """A request of a front-end, until it has a response. `call` is None until it is submitted."""

    __slots__ = ("_port", "_ticket", "call")

    def __init__(self, port: FrontEndPort, ticket: int) -> None:
        self._port = port
        self._ticket = ticket
        self.call: InferenceCall | None = None

    def complete(self, reply: InferenceReply) -> None:
        """Send the response."""
        self._port.respond(self._ticket, reply)
