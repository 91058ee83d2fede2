"""The protocol's other methods: a front-end passes them on to the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc

from tensorferry.protos import SERVICE_NAME
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.front_end.engine_connection import no_engine_error
from tensorferry.server.identity import CURRENT_CLIENT
from tensorferry.server.security.forwarded_identity import forwarded
from tensorferry.server.status import ANSWERED_KEY, PUSHBACK_KEY, Status, StatusError

_INFERENCE = frozenset({"ModelInfer", "ModelStreamInfer"})
# What a front-end answers without an engine, because a probe must learn whether this process works.
_WITHOUT_ENGINE: Mapping[str, Callable[[], Any]] = {
    "ServerLive": lambda: pb.ServerLiveResponse(live=True),
    "ServerReady": lambda: pb.ServerReadyResponse(ready=False),
    "ModelReady": lambda: pb.ModelReadyResponse(ready=False),
}
# Codes of a connection that broke, and of a channel that was closed.
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class ForwardedMethods:
    """The methods that the engine implements, by its gRPC server on a Unix socket. Thread-safe."""

    names: Sequence[str] = ()

    def __init__(self) -> None:
        self._channel: grpc.Channel | None = None

    def connect(self, socket: str) -> None:
        """Pass calls on to the engine that listens on this Unix socket from now on."""
        self.disconnect()
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=_OPTIONS)

    def disconnect(self) -> None:
        """End the calls that the engine has; it is gone. No effect without one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return the methods by name."""
        service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
        return {
            method.name: partial(self._forward, method.name, getattr(pb, method.output_type.name))
            for method in service.methods
            if method.name not in _INFERENCE
        }

    def _forward(self, name: str, kind: Any, request: Any) -> Any:
        channel = self._channel
        if channel is not None:
            try:
                method = channel.unary_unary(
                    f"/{SERVICE_NAME}/{name}",
                    request_serializer=type(request).SerializeToString,
                    response_deserializer=kind.FromString,
                )
                return method(request, metadata=forwarded(CURRENT_CLIENT.get()))
            except ValueError:
                # The channel was closed, because the engine is gone.
                pass
            except grpc.RpcError as error:
                if (status := answered_status(error)) is not None:
                    raise StatusError(status) from None
        if name in _WITHOUT_ENGINE:
            return _WITHOUT_ENGINE[name]()
        raise no_engine_error()


def answered_status(error: Any) -> Status | None:
    """Return the status that the engine sent; None if the connection to it broke."""
    trailing = dict(error.trailing_metadata() or ())
    if error.code() in _BROKEN and ANSWERED_KEY not in trailing and PUSHBACK_KEY not in trailing:
        return None
    pushback = trailing.get(PUSHBACK_KEY)
    retry_after = None if pushback is None else float(pushback) / 1e3
    return Status(error.code(), error.details() or "", retry_after)
