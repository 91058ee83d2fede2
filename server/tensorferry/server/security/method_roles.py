"""The role that each method wants."""

from __future__ import annotations

from collections.abc import Mapping

from tensorferry.protos import SERVICE_NAME
from tensorferry.server.identity import CONTROL, INFER
from tensorferry.server.names import HEALTH_SERVICE, REFLECTION_SERVICES

# All of the service's. Those that read and change by the same message want what a change does.
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

_OURS = f"/{SERVICE_NAME}/"

_ROLES: Mapping[str, str] = {
    **{f"{_OURS}{name}": role for name, role in REQUIRED_ROLES.items()},
    **{f"/{service}/ServerReflectionInfo": INFER for service in REFLECTION_SERVICES},
    f"/{HEALTH_SERVICE}/Check": INFER,
    f"/{HEALTH_SERVICE}/Watch": INFER,
    # Which names every model.
    f"/{HEALTH_SERVICE}/List": INFER,
}

# What load balancers and orchestrators ask, who have no token: nothing but whether a name serves.
HEALTH = frozenset(
    {
        f"{_OURS}ServerLive",
        f"{_OURS}ServerReady",
        f"/{HEALTH_SERVICE}/Check",
        f"/{HEALTH_SERVICE}/Watch",
    }
)

# Those that ask by themselves, since they need to know who calls.
SELF_AUTHORIZING = frozenset({f"{_OURS}ModelInfer", f"{_OURS}ModelStreamInfer"})


def required_role(method: str) -> str:
    """By the method's path. One that is not known is given to those only who may do everything."""
    return _ROLES.get(method, CONTROL)
