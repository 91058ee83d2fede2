"""Names in the protocol: the pattern of model names, and the names of standard services."""

from __future__ import annotations

import re

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
# The same rule for error messages.
NAME_RULE = "a name starts with a letter or digit, continues with letters, digits, '.', '_' and '-', and has at most 128 characters"

# Not read from the descriptors, because the supervisor must not import protobuf.
HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
