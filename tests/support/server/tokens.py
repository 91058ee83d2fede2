"""Calls of every method, with and without tokens, and their statuses."""

from __future__ import annotations

import hashlib
from typing import Any

import grpc
from support.server.rig import PATIENCE

from tensorferry.protos import SERVICE_NAME
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.standard import health_pb2

METHODS = {
    method.name: f"/{SERVICE_NAME}/{method.name}"
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
}
HEALTH = {
    method.name: f"/grpc.health.v1.Health/{method.name}"
    for method in health_pb2.DESCRIPTOR.services_by_name["Health"].methods
}
REFLECTION = {"ServerReflectionInfo": "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"}
EVERY = METHODS | HEALTH | REFLECTION
STREAMS = ("ModelStreamInfer", "ServerReflectionInfo", "Watch")
TOKENS = {"infer": "infer-secret", "control": "control-secret", "infer,control": "both-secret"}
OK = grpc.StatusCode.OK
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


def line(name: str, roles: str, token: str) -> str:
    return f"{name} {roles} sha256:{hashlib.sha256(token.encode()).hexdigest()}\n"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def outcome(
    channel: grpc.Channel, method: str, metadata: tuple[tuple[str, str], ...] = (), data: bytes = b""
) -> tuple[grpc.StatusCode, str]:
    """Return the status of a call with this message: of a stream, up to its first answer."""
    try:
        if method.endswith(STREAMS):
            # Streaming both ways is what every stream can be called by.
            stream: Any = channel.stream_stream(method)
            call = stream(iter([data]), timeout=PATIENCE, metadata=metadata)
            next(call, None)
            call.cancel()
        else:
            unary: Any = channel.unary_unary(method)
            unary(data, timeout=PATIENCE, metadata=metadata)
    except grpc.RpcError as error:
        status: Any = error
        return status.code(), status.details()
    return OK, ""
