"""Role that each method requires."""

from __future__ import annotations

from collections.abc import Mapping

from tensorferry.protos import SERVICE_NAME
from tensorferry.server.identity import CONTROL, INFER
from tensorferry.server.names import HEALTH_SERVICE, REFLECTION_SERVICES

# All methods of the service. A method that reads or changes, depending on the message, requires the role to change.
REQUIRED_ROLES: Mapping[str, str] = {
    "ServerLive": INFER,
    "ServerReady": INFER,
    "ModelReady": INFER,
    "ServerMetadata": INFER,
    "ModelMetadata": INFER,
    "ModelInfer": INFER,
    "ModelStreamInfer": INFER,
    "ModelConfig": INFER,
    "ModelStatistics": INFER,
    "RepositoryIndex": INFER,
    "RepositoryModelLoad": CONTROL,
    "RepositoryModelUnload": CONTROL,
    "SystemSharedMemoryStatus": CONTROL,
    "SystemSharedMemoryRegister": CONTROL,
    "SystemSharedMemoryUnregister": CONTROL,
    "CudaSharedMemoryStatus": CONTROL,
    "CudaSharedMemoryRegister": CONTROL,
    "CudaSharedMemoryUnregister": CONTROL,
    "TraceSetting": CONTROL,
    "LogSettings": CONTROL,
}

_SERVICE = f"/{SERVICE_NAME}/"

_ROLES: Mapping[str, str] = {
    **{f"{_SERVICE}{name}": role for name, role in REQUIRED_ROLES.items()},
    **{f"/{service}/ServerReflectionInfo": INFER for service in REFLECTION_SERVICES},
    f"/{HEALTH_SERVICE}/Check": INFER,
    f"/{HEALTH_SERVICE}/Watch": INFER,
    # Lists every model.
    f"/{HEALTH_SERVICE}/List": INFER,
}

# Health checks by load balancers and orchestrators, which have no token. They reveal only whether a name is served.
HEALTH = frozenset(
    {
        f"{_SERVICE}ServerLive",
        f"{_SERVICE}ServerReady",
        f"/{HEALTH_SERVICE}/Check",
        f"/{HEALTH_SERVICE}/Watch",
    }
)

# Methods whose transports authorize calls themselves, because they need the identity.
SELF_AUTHORIZING = frozenset({f"{_SERVICE}ModelInfer", f"{_SERVICE}ModelStreamInfer"})


def required_role(method: str) -> str:
    """Return the role for a method's path. An unknown method requires the control role."""
    return _ROLES.get(method, CONTROL)
