"""Names in the protocol: the pattern of model names, and the names of standard services."""

from __future__ import annotations

import re

from tensorferry.protos.standard import health_pb2, reflection_pb2, reflection_v1alpha_pb2

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
# The same rule for error messages.
NAME_RULE = "a name starts with a letter or digit, continues with letters, digits, '.', '_' and '-', and has at most 128 characters"

HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

REFLECTION_SERVICES: tuple[str, ...] = tuple(
    file.DESCRIPTOR.services_by_name["ServerReflection"].full_name
    for file in (reflection_pb2, reflection_v1alpha_pb2)
)
