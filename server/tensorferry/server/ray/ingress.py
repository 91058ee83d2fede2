"""What Ray's gRPC proxies are told of our service.

Ray hands a call's metadata to the replica, but not its deadline; so the proxy adds it to the metadata (`ray_deadline.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from ray.exceptions import ActorDiedError

from tensorferry.protos import SERVICE_NAME
from tensorferry.server.ray.deadline import DEADLINE, told

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
    """What is named in `grpc_servicer_functions`: Ray calls it in every proxy."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        name: grpc.unary_unary_rpc_method_handler(_replaced) for name in UNARY
    }
    methods[STREAM] = grpc.stream_stream_rpc_method_handler(_replaced)
    handler: Any = grpc.method_handlers_generic_handler(SERVICE_NAME, methods)
    # Ray puts functions of its own into the handler, which pass calls on to replicas.
    server.add_generic_rpc_handlers((handler,))
    handler._method_handlers = {
        name: method._replace(
            unary_unary=_unary_with_deadline(method.unary_unary),
            stream_stream=_stream_with_deadline(method.stream_stream),
        )
        for name, method in handler._method_handlers.items()
    }


class _WithDeadline:
    """A call's context whose metadata has the deadline too."""

    def __init__(self, context: Any) -> None:
        self._context = context
        remaining = context.time_remaining()
        # Whatever the client says itself does not count.
        self._metadata = [pair for pair in context.invocation_metadata() or () if pair[0] != DEADLINE]
        if remaining is not None:
            self._metadata.append((DEADLINE, told(remaining)))

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return self._metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _unary_with_deadline(
    passed_on: Callable[[Any, Any], Awaitable[bytes]],
) -> Callable[[Any, Any], Awaitable[bytes]]:
    async def method(request: bytes, context: Any) -> bytes:
        response = await passed_on(request, _WithDeadline(context))
        _tell_of_lost_replica(context)
        return response

    return method


def _stream_with_deadline(
    passed_on: Callable[[Any, Any], AsyncIterator[bytes]],
) -> Callable[[Any, Any], AsyncIterator[bytes]]:
    async def method(requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for response in passed_on(requests, _WithDeadline(context)):
            # Empty where it brings the status of a stream, and no message.
            if response:
                yield response
        _tell_of_lost_replica(context)

    return method


def _tell_of_lost_replica(context: Any) -> None:
    """In place of INTERNAL and what Ray knows of the replica: its process, its address."""
    if (context.details() or "").startswith(ActorDiedError.BASE_ERROR_MSG):
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details("the replica is gone that had this call; others take calls: try again")


def _replaced(request: Any, context: Any) -> Any:
    raise AssertionError("Ray passes calls on to a replica")
