"""The protocol over HTTP, as what an HTTP server serves."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from functools import partial

from tensorferry.server.inference.service import InferenceService
from tensorferry.server.transport.http.answers import error_response, response_of
from tensorferry.server.transport.http.connection import Exchange
from tensorferry.server.transport.http.cors import cross_origin
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.heads import Router
from tensorferry.server.transport.http.inference_calls import InferenceCalls
from tensorferry.server.transport.http.method_calls import MethodCalls
from tensorferry.server.transport.http.routes import INFER, routed
from tensorferry.server.transport.threaded_servicer import Extension
from tensorferry.server.transport.transport_state import TransportState


class InferenceApplication:
    """Serves inferences, and the methods of `extensions`, on the loop's thread. See `Application`.

    `shared` is that of all transports; `on_loop` calls a function on the loop's thread.
    """

    def __init__(
        self,
        service: InferenceService,
        extensions: Sequence[Extension],
        shared: TransportState,
        listening: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        self._service = service
        # Whether a web page can call this server by a name of its own that resolves to this machine.
        local = ipaddress.ip_address(listening.getsockname()[0]).is_loopback
        local = local and shared.tls is None and not shared.requires_credentials
        route: Router = partial(routed, local=local)
        self.route = cross_origin(route, shared.cors_origins) if shared.cors_origins else route
        self.methods = MethodCalls(service, extensions, shared.access, on_loop)
        self.inferences = InferenceCalls(service, shared, self.methods, loop, on_loop)
        self.refusal, self.max_body_bytes = self.methods.refusal, self.methods.max_body_bytes

    def serve(self, exchange: Exchange, body: bytes) -> None:
        """Answer a request, at once or later."""
        target = exchange.head.target
        try:
            if isinstance(target, HttpError):
                # Not raised, because it would keep a traceback of each request.
                exchange.respond(error_response(target, exchange.head.errors))
            elif target.route.rpc == INFER:
                self.inferences.serve(exchange, target, body)
            else:
                self.methods.serve(exchange, target, body)
        except Exception as error:
            exchange.respond(response_of(error, self._service, exchange.head.errors))

    def close(self) -> None:
        """End the threads. Called on any thread, after the loop has ended."""
        self.inferences.close()
        self.methods.close()
