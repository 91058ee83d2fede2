"""A stream of the server's own for a model's kernels, where these are to go before other models' or after them.

A stream's priority is settled when it is made, and ONNX Runtime makes its own without: so it gets one of ours.
"""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

from tensorferry.server.errors import StartError
from tensorferry.server.gpu.pinned_memory import CudaDeviceMemory, MemoryBlock
from tensorferry.server.runtime.ort_options import TENSORRT, KernelPriority
from tensorferry.server.runtime.providers import CUDA, Providers

_log = logging.getLogger("tensorferry.server")


def create_stream(device: str, priority: KernelPriority | None, path: Path) -> MemoryBlock | None:
    """A stream for a model on this device; None where it needs none, or, with a line in the log, there can be none."""
    if priority is None or device == "cpu":
        return None
    try:
        return CudaDeviceMemory(int(device.partition(":")[2])).stream(first=priority is KernelPriority.FIRST)
    except (StartError, RuntimeError) as error:
        _log.warning("%s on %s goes neither before other models nor after them: %s", path, device, error)
        return None


def with_stream(providers: Providers, stream: MemoryBlock) -> Providers:
    """The same providers, whose kernels run on this stream."""
    ours = {"user_compute_stream": str(stream.address)}
    return [
        (name, {**options, **ours} if name in (CUDA, TENSORRT) else options) for name, options in providers
    ]


def keep_until_closed(session: Any, stream: MemoryBlock) -> None:
    """Keeps the stream until ONNX Runtime's session is gone, which bindings may keep for longer than we do."""
    weakref.finalize(getattr(session, "_sess", session), _let_go, stream).atexit = False


def _let_go(stream: MemoryBlock) -> None:
    """The stream goes with the last reference, which this call had."""
    del stream
