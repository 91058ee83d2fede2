"""CUDA streams with a priority, for models whose kernels start before or after those of other models.

ONNX Runtime creates its streams without a priority, and a stream's priority cannot be changed later. So the server
creates the stream.
"""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

from tensorferry.server.errors import StartError
from tensorferry.server.runtime.gpu.pinned_memory import DeviceMemory, MemoryBlock

_log = logging.getLogger("tensorferry.server")


def create_stream(device: str, first: bool | None, path: Path) -> MemoryBlock | None:
    """Create a stream for a model on this device, whose kernels start before or after those of other streams.

    None if it needs none, or, with a warning, if that fails.
    """
    if first is None or device == "cpu":
        return None
    try:
        return DeviceMemory(int(device.partition(":")[2])).stream(first=first)
    except (StartError, RuntimeError) as error:
        _log.warning("%s on %s runs without a priority: %s", path, device, error)
        return None


def keep_until_closed(session: Any, stream: MemoryBlock) -> None:
    """Keep the stream until ONNX Runtime's session is freed. Bindings may keep the session longer than the server."""
    weakref.finalize(getattr(session, "_sess", session), lambda stream: None, stream).atexit = False
