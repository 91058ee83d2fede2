"""Methods that would change one of several server processes: they are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import OneProcessError
from tensorferry.server.transport.threaded_servicer import Extension

_RELOAD = "change the files and send SIGHUP to the server, which replaces its processes one by one"
_ALONE = "start the server with --processes 1"

# What a client can do instead.
_INSTEAD: Mapping[str, str] = {
    "RepositoryModelLoad": _RELOAD,
    "RepositoryModelUnload": _RELOAD,
    "SystemSharedMemoryRegister": _ALONE,
    "SystemSharedMemoryUnregister": _ALONE,
    "CudaSharedMemoryRegister": _ALONE,
    "CudaSharedMemoryUnregister": _ALONE,
    "LogSettings": "give the settings as options, and send SIGHUP to the server",
}


class OneProcessOnly:
    """An extension of a server of several processes. A call reaches one of them, and changes must reach all.

    LogSettings without settings is a read, and is answered.
    """

    def __init__(self, extension: Extension) -> None:
        self._extension = extension

    @property
    def names(self) -> Sequence[str]:
        """Those of the extension."""
        return self._extension.names

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return the extension's methods, of which those that change something raise OneProcessError."""
        return {
            name: partial(_refuse, name, method) if name in _INSTEAD else method
            for name, method in self._extension.methods().items()
        }


def _refuse(name: str, method: Callable[[Any], Any], request: Any) -> Any:
    if isinstance(request, pb.LogSettingsRequest) and not request.settings:
        return method(request)
    raise OneProcessError(
        f"{name} would change one of the server's processes only, and it has several: {_INSTEAD[name]}"
    )
