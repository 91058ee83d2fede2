"""The message types that clients send, by method."""

from __future__ import annotations

from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.standard import health_pb2, reflection_pb2

SERVICES = (
    pb.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
KINDS = {
    method.input_type.full_name: getattr(module, method.input_type.name)
    for service, module in zip(SERVICES, (pb, health_pb2, reflection_pb2), strict=True)
    for method in service.methods
}
BY_METHOD: dict[str, Any] = {
    method.name: KINDS[method.input_type.full_name] for service in SERVICES for method in service.methods
}
