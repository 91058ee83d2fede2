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
from tensorferry.server.runtime.gpu.pinned_memory import CudaDeviceMemory, MemoryBlock
from tensorferry.server.runtime.ort_options import TENSORRT, KernelPriority
from tensorferry.server.runtime.providers import CUDA, Providers

_log = logging.getLogger("tensorferry.server")


def create_stream(device: str, priority: KernelPriority | None, path: Path) -> MemoryBlock | None:
    """Create a stream for a model on this device; None if it needs none, or, with a warning, if that fails."""
    if priority is None or device == "cpu":
        return None
    try:
        return CudaDeviceMemory(int(device.partition(":")[2])).stream(first=priority is KernelPriority.FIRST)
    except (StartError, RuntimeError) as error:
        _log.warning("%s on %s runs without a priority: %s", path, device, error)
        return None


def with_stream(providers: Providers, stream: MemoryBlock) -> Providers:
    """Return the same providers with their kernels on this stream."""
    stream_option = {"user_compute_stream": str(stream.address)}
    return [
        (name, {**options, **stream_option} if name in (CUDA, TENSORRT) else options)
        for name, options in providers
    ]


def keep_until_closed(session: Any, stream: MemoryBlock) -> None:
    """Keep the stream until ONNX Runtime's session is freed. Bindings may keep the session longer than the server."""
    weakref.finalize(getattr(session, "_sess", session), _drop_stream, stream).atexit = False


def _drop_stream(stream: MemoryBlock) -> None:
    """Drop the last reference to the stream."""
    del stream
