"""Ray Serve application: replicas with the server's batcher and sessions, behind Ray's gRPC ingress.

`application` builds it, and `add_to_ingress` registers the service in Ray's proxies; docs/guides/operations.md describes how to
start it. A replica serves requests by the server's service, without its transports. The proxy passes requests on as bytes,
and only the replica parses them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ray import serve
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.app import App
from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.observability.logs import logs
from tensorferry.server.ray.configuration import configuration
from tensorferry.server.ray.deadline import decode_deadline
from tensorferry.server.ray.stream import RayStream
from tensorferry.server.status import Status, status_of, trailing_metadata
from tensorferry.server.transport.unread_responses import UnreadResponses
from tensorferry.server.wire.receiving import receive


class SerializedMessage:
    """Bytes of a message, with the method that Ray calls to serialise messages."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Return the bytes."""
        return self._data


class Replica:
    """A replica, with the methods of GRPCInferenceService; they run on the event loop of Ray."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        config = configuration(options)
        # Acquired by the first stop, and never released; guards nothing.
        self._stopped = threading.Lock()
        logs.configure(config.log_format, config.log_level)
        self._app = App(config)
        self._app.load()
        self._service = self._app.service
        self._methods = self._app.core_methods.methods()

    async def ModelInfer(self, request: bytes, grpc_context: RayServegRPCContext) -> SerializedMessage:  # noqa: N802
        """Run one request; concurrent requests share batches."""
        metadata = grpc_context.invocation_metadata()
        reply = await self.reply(request, decode_deadline(metadata), metadata)
        try:
            return SerializedMessage(reply.message())
        except Exception as error:
            return self._error(self._service.status_of(error, reply), grpc_context)

    async def ModelStreamInfer(  # noqa: N802
        self, requests: gRPCInputStream[bytes], grpc_context: RayServegRPCContext
    ) -> AsyncIterator[SerializedMessage]:
        """Run the requests of a stream; the metadata selects request order or completion order of the responses."""
        metadata = grpc_context.invocation_metadata()
        token = object()
        stream = RayStream(
            partial(self.reply, stream=token),
            self._service.status_of,
            decode_deadline(metadata),
            metadata,
            max_in_flight=self._app.config.max_in_flight_per_stream,
            max_bytes=UnreadResponses(self._app.config.max_unsent_bytes).stream_limit,
        )
        try:
            async for message in stream.responses(requests):
                yield SerializedMessage(message)
        finally:
            self._service.end_stream(token)
        if stream.end is not None:
            # Ray sends the context only with a message; the proxy drops the empty message.
            yield self._error(stream.end, grpc_context)

    async def ServerLive(self, request: bytes, grpc_context: RayServegRPCContext) -> SerializedMessage:  # noqa: N802
        """Return whether a replica responds."""
        return self._call("ServerLive", request, grpc_context)

    async def ServerReady(self, request: bytes, grpc_context: RayServegRPCContext) -> SerializedMessage:  # noqa: N802
        """Return whether a replica is ready."""
        return self._call("ServerReady", request, grpc_context)

    async def ModelReady(self, request: bytes, grpc_context: RayServegRPCContext) -> SerializedMessage:  # noqa: N802
        """Return whether the model is ready on a replica."""
        return self._call("ModelReady", request, grpc_context)

    async def ServerMetadata(self, request: bytes, grpc_context: RayServegRPCContext) -> SerializedMessage:  # noqa: N802
        """Return name, version and extensions."""
        return self._call("ServerMetadata", request, grpc_context)

    async def ModelMetadata(self, request: bytes, grpc_context: RayServegRPCContext) -> SerializedMessage:  # noqa: N802
        """Return the model's signature."""
        return self._call("ModelMetadata", request, grpc_context)

    async def ModelConfig(self, request: bytes, grpc_context: RayServegRPCContext) -> SerializedMessage:  # noqa: N802
        """Return the model's configuration."""
        return self._call("ModelConfig", request, grpc_context)

    async def check_health(self) -> None:
        """Raise RuntimeError if no model works; Ray calls this periodically and replaces such a replica."""
        if not self._app.registry.serving:
            reasons = [
                f"{model.name}: {model.health.reason}"
                for model in self._app.registry.models()
                if model.health.reason is not None
            ]
            raise RuntimeError("; ".join(reasons) or "no model is ready")

    def __del__(self) -> None:
        # Ray calls this when no call is in progress, or after its graceful shutdown time-out.
        app = getattr(self, "_app", None)
        if app is not None and self._stopped.acquire(blocking=False):
            app.drain()
            app.stop()

    async def reply(
        self, request: bytes, deadline: float, metadata: Any, *, stream: object = None
    ) -> InferenceReply:
        """Return the reply to a request; cancelling the caller cancels the request."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[InferenceReply] = loop.create_future()

        def complete(reply: InferenceReply) -> None:
            # RuntimeError means that the loop is closed, and every call with it.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_set_result, future, reply)

        call: InferenceCall = self._service.submit(request, deadline, complete, metadata, stream=stream)
        try:
            return await future
        except asyncio.CancelledError:
            call.cancel()
            raise

    def _call(self, name: str, request: bytes, context: RayServegRPCContext) -> SerializedMessage:
        try:
            message = receive(request, getattr(pb, f"{name}Request"))
            return SerializedMessage(self._methods[name](message).SerializeToString())
        except Exception as error:
            return self._error(status_of(error), context)

    def _error(self, status: Status, context: RayServegRPCContext) -> SerializedMessage:
        """Set the status of a call. It is not raised, because Ray would log a bug and send the stack to the client."""
        context.set_code(status.code)
        context.set_details(status.message)
        context.set_trailing_metadata(list(trailing_metadata(status)))
        return SerializedMessage(b"")


def _set_result(future: asyncio.Future[InferenceReply], reply: InferenceReply) -> None:
    if not future.done():
        future.set_result(reply)


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """Return the application for the options of `configuration` and `deployment`, Ray's options of the deployment.

    ConfigError if an option has a bad value, before anything is started.
    """
    options = dict(arguments)
    deployment = dict(options.pop("deployment", {}))
    config = configuration(options)
    # Ray starts another replica when the requests in progress fill two batches.
    target = 2 * max(1, *config.values("max_batch_size"))
    scaling = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": target}
    if "num_replicas" not in deployment:
        deployment.setdefault("autoscaling_config", scaling)
    deployment.setdefault("max_ongoing_requests", 16 * target)
    deployment.setdefault("graceful_shutdown_timeout_s", config.drain_seconds + 5.0)
    replica_class: Any = serve.deployment(Replica, name="tensorferry", **deployment)
    return replica_class.bind(options)
