"""Registration of the service in Ray's gRPC proxies.

Ray passes the metadata of a call to the replica, but not its deadline, so the proxy adds the deadline to the metadata.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from ray.exceptions import ActorDiedError

from tensorferry.protos import SERVICE_NAME
from tensorferry.server.ray.deadline import DEADLINE, encode_deadline

UNARY = (
    "ModelInfer",
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelConfig",
)
STREAM = "ModelStreamInfer"


def add_to_ingress(servicer: object, server: Any) -> None:
    """Add the service to a proxy's server; Ray calls this in every proxy, as `grpc_servicer_functions` names it."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        name: grpc.unary_unary_rpc_method_handler(_placeholder) for name in UNARY
    }
    methods[STREAM] = grpc.stream_stream_rpc_method_handler(_placeholder)
    handler: Any = grpc.method_handlers_generic_handler(SERVICE_NAME, methods)
    # This replaces the functions of the handler by Ray's, which pass calls on to replicas.
    server.add_generic_rpc_handlers((handler,))
    handler._method_handlers = {
        name: method._replace(
            unary_unary=_unary_with_deadline(method.unary_unary),
            stream_stream=_stream_with_deadline(method.stream_stream),
        )
        for name, method in handler._method_handlers.items()
    }


class _WithDeadline:
    """Context of a call with the deadline added to its metadata."""

    def __init__(self, context: Any) -> None:
        self._context = context
        remaining = context.time_remaining()
        # A value that the client sent is dropped.
        self._metadata = [pair for pair in context.invocation_metadata() or () if pair[0] != DEADLINE]
        if remaining is not None:
            self._metadata.append((DEADLINE, encode_deadline(remaining)))

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return self._metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _unary_with_deadline(
    forward: Callable[[Any, Any], Awaitable[bytes]],
) -> Callable[[Any, Any], Awaitable[bytes]]:
    async def method(request: bytes, context: Any) -> bytes:
        response = await forward(request, _WithDeadline(context))
        _hide_lost_replica(context)
        return response

    return method


def _stream_with_deadline(
    forward: Callable[[Any, Any], AsyncIterator[bytes]],
) -> Callable[[Any, Any], AsyncIterator[bytes]]:
    async def method(requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for response in forward(requests, _WithDeadline(context)):
            # An empty message has only the status of the stream.
            if response:
                yield response
        _hide_lost_replica(context)

    return method


def _hide_lost_replica(context: Any) -> None:
    """Return UNAVAILABLE instead of Ray's INTERNAL, whose details have the replica's process and address."""
    if (context.details() or "").startswith(ActorDiedError.BASE_ERROR_MSG):
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details("the replica of this call is gone; other replicas accept calls: try again")


def _placeholder(request: Any, context: Any) -> Any:
    raise AssertionError("Ray replaces this function")
