"""The protocol's other methods over HTTP: each fills the message of its gRPC method, and runs on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import ServerError
from tensorferry.server.identity import CONTROL, CURRENT_CLIENT, ClientIdentity
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.security.access_control import AccessControl
from tensorferry.server.security.method_roles import HEALTH, required_role
from tensorferry.server.system.threads import HandlerThreads
from tensorferry.server.transport.http.answers import error_of, response_of
from tensorferry.server.transport.http.bodies import unpacked
from tensorferry.server.transport.http.connection import Connection, Exchange
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.heads import Head
from tensorferry.server.transport.http.json_values import HALF_A_PAIR, Fields, fields_of
from tensorferry.server.transport.http.routes import INFER, Target, path_of
from tensorferry.server.transport.threaded_servicer import Extension, methods_of
from tensorferry.server.wire import bounds
from tensorferry.server.wire.receiving import receive

_log = logging.getLogger("tensorferry.server")

# Loading a model takes long.
_THREADS = 16


class MethodCalls:
    """Serves the methods of `extensions`; `on_loop` calls a function on the event loop's thread."""

    def __init__(
        self,
        service: InferenceService,
        extensions: Sequence[Extension],
        access: AccessControl | None,
        on_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        self._service = service
        self._max_body_bytes = service.limits.message_bytes
        self._access = access
        self._on_loop = on_loop
        self._handlers = methods_of(extensions)
        self._threads = HandlerThreads(_THREADS, "http-method")
        # The ready models of a generation. Needs no lock, because threads can only replace it by what is as true.
        self._known: tuple[int, Sequence[pb.ModelMetadataResponse]] = (-1, ())

    def metadata(self, name: str, version: str) -> pb.ModelMetadataResponse:
        """Return the metadata of a model. Raises what the method raises."""
        metadata: pb.ModelMetadataResponse = self._handlers["ModelMetadata"](
            pb.ModelMetadataRequest(name=name, version=version)
        )
        return metadata

    def ready_models(self) -> Sequence[pb.ModelMetadataResponse]:
        """Return the metadata of the models that are ready."""
        index = self._handlers["RepositoryIndex"](pb.RepositoryIndexRequest(ready=True))
        found = []
        for name in dict.fromkeys(model.name for model in index.models):
            # It may be unloaded meanwhile.
            with contextlib.suppress(ServerError):
                found.append(self.metadata(name, ""))
        return found

    def known_models(self) -> Sequence[pb.ModelMetadataResponse]:
        """Return `ready_models` as they were when a model was last loaded, replaced or unloaded."""
        # Before the models, because one may be loaded meanwhile.
        generation = self._service.generation
        if self._known[0] != generation:
            self._known = generation, self.ready_models()
        return self._known[1]

    def serve(self, exchange: Exchange, target: Target, body: bytes) -> None:
        """Answer a request: of health at once, because it is asked while all threads are busy, else later.

        `ServerError` if the client may not call the method.
        """
        head, method, client = exchange.head, path_of(target.route), CURRENT_CLIENT.get()
        if method in HEALTH:
            exchange.respond(self._response(target, head, body, client))
            return
        if self._access is not None:
            client = self._admit(self._access, exchange.connection, method, head)
            if required_role(method) == CONTROL:
                _log.info("%s is called by %s", target.route.rpc, client.name)

        def work() -> None:
            self._on_loop(partial(exchange.respond, self._response(target, head, body, client)))

        self._threads.submit(work)

    def refusal(self, connection: Connection, head: Head) -> HttpError | None:
        """Return why a request is refused whatever its body is, so that the body of a client without a right is not kept."""
        if isinstance(head.target, HttpError):
            return head.target
        method = path_of(head.target.route)
        if self._access is not None and method not in HEALTH:
            try:
                self._admit(self._access, connection, method, head)
            except Exception as error:
                return error_of(self._service.status_of(error))
        return None

    def max_body_bytes(self, head: Head) -> int:
        """Return the bytes of the largest body: few, but for tensors and the files of a model."""
        if not isinstance(head.target, HttpError) and head.target.route.rpc not in (
            INFER,
            "RepositoryModelLoad",
        ):
            return bounds.MAX_MESSAGE_BYTES
        return self._max_body_bytes

    def _admit(
        self, access: AccessControl, connection: Connection, method: str, head: Head
    ) -> ClientIdentity:
        return access.admit(
            required_role(method), head.fields, lambda: connection.peer, lambda: connection.certificate
        )

    def _response(self, target: Target, head: Head, body: bytes, client: ClientIdentity) -> bytes:
        route, token = target.route, CURRENT_CLIENT.set(client)
        try:
            most = self.max_body_bytes(head)
            fields: Fields = {}
            # The body of GET means nothing.
            if body and head.method == "POST":
                if head.encoding != "identity":
                    body = unpacked(body, head.encoding, most)
                fields = fields_of(body)
            if route.describes:
                return route.answer(self.ready_models(), target.parts)
            message = getattr(pb, f"{route.rpc}Request")(**target.parts)
            try:
                if route.fill is not None:
                    route.fill(message, fields)
            except UnicodeEncodeError:
                raise HttpError(400, HALF_A_PAIR) from None
            # As over gRPC: within the bounds of its names and lists.
            message = receive(message.SerializeToString(), type(message), most)
            if route.known:
                self.metadata(target.parts["name"], target.parts["version"])
            return route.answer(self._handlers[route.rpc](message), target.parts)
        except BaseException as error:
            # Every exception, because nothing else would answer the request.
            return response_of(error, self._service, head.errors)
        finally:
            CURRENT_CLIENT.reset(token)

    def close(self) -> None:
        """End the threads. Called on any thread, after the loop has ended."""
        self._threads.shutdown(wait=False)
