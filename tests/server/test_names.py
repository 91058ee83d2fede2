"""Names of standard services are those of their descriptors."""

from __future__ import annotations

from tensorferry.protos.standard import health_pb2, reflection_pb2, reflection_v1alpha_pb2
from tensorferry.server.names import HEALTH_SERVICE, REFLECTION_SERVICES


def test_names_of_services() -> None:
    assert health_pb2.DESCRIPTOR.services_by_name["Health"].full_name == HEALTH_SERVICE
    names = [
        file.DESCRIPTOR.services_by_name["ServerReflection"].full_name
        for file in (reflection_pb2, reflection_v1alpha_pb2)
    ]
    assert names == list(REFLECTION_SERVICES)
