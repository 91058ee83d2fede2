"""Devices: which CUDA devices the driver has, and which of them --device comes to."""

from __future__ import annotations

import ctypes
import logging
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from tensorferry.server.errors import StartError
from tensorferry.server.runtime.ort import onnxruntime

_log = logging.getLogger("tensorferry.server")

# "0000:3b:00.0", with room for the longer domains of virtual machines.
_BUS_ID_BYTES = 32


def cuda_device_count() -> int:
    """The CUDA devices that the driver has; 0 without a driver."""
    driver = _driver()
    count = ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def pci_bus_id(index: int) -> str | None:
    """Where on the PCI bus the CUDA device of this number is; None when the driver does not tell.

    CUDA numbers devices as CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER say; other interfaces do not
    follow these, but all agree on the bus.
    """
    driver = _driver()
    device = ctypes.c_int(0)
    text = ctypes.create_string_buffer(_BUS_ID_BYTES)
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None
    if driver.cuDeviceGetPCIBusId(text, _BUS_ID_BYTES, device) != 0:
        return None
    return text.value.decode()


def _driver() -> Any | None:
    """The driver's library, ready for use."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def choose_device(wanted: str) -> str:
    """Where to run, `cpu`, `cuda:N` or `cuda:N,M`, for a --device: one of these, `auto` or `cuda`.

    `auto` falls back to the CPU with one line in the log; StartError when a CUDA device was
    asked for and is not there.
    """
    if wanted == "cpu":
        return "cpu"
    missing = _why_no_cuda(gpu_indices(wanted))
    if missing is None:
        preload_libraries()
        return wanted if wanted.startswith("cuda:") else "cuda:0"
    if wanted == "auto":
        _log.info("running on the CPU: %s", missing)
        return "cpu"
    raise StartError(
        f"--device is {wanted!r}, but {missing}; use --device cpu, or auto to fall back by itself"
    )


def preload_libraries() -> None:
    """Has ONNX Runtime load the CUDA and cuDNN libraries that are installed as Python packages, since 1.21.

    It looks beside itself and where the system does, and prints what it does not find: here that goes into the log,
    since stdout is read by whoever started us. Of other folders that Python has packages in it is told then.
    """
    if not hasattr(onnxruntime, "preload_dlls"):
        return
    if _preloaded():
        packages = find_spec("nvidia")
        for place in (packages.submodule_search_locations or ()) if packages is not None else ():
            for folder in sorted(Path(place).glob("*/lib")):
                _preloaded(directory=str(folder))
        for line in _preloaded():
            _log.warning("ONNX Runtime's CUDA libraries: %s", line)


def _preloaded(**options: str) -> list[str]:
    """What it says of those that it does not find."""
    said = StringIO()
    with redirect_stdout(said):
        onnxruntime.preload_dlls(**options)
    return said.getvalue().splitlines()


def available_devices(wanted: str, device: str) -> AvailableDevices:
    """Where a configuration may put a model, where --device is `wanted`, and came to `device`."""
    if wanted == "cpu":
        return AvailableDevices(device, (), "--device is cpu")
    missing = _why_no_cuda(gpu_indices(wanted))
    if missing is not None:
        return AvailableDevices(device, (), missing)
    return AvailableDevices(device, gpu_indices(wanted) or tuple(range(cuda_device_count())))


def _why_no_cuda(indices: tuple[int, ...]) -> str | None:
    """Why these devices, or without any the first, cannot be used."""
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "the installed onnxruntime has no CUDA provider (pip install 'tensorferry[gpu]' has it)"
    count = cuda_device_count()
    for index in indices or (0,):
        if index >= count:
            return f"there is no CUDA device {index} (the driver reports {count})"
    return None


def gpu_indices(device: str) -> tuple[int, ...]:
    """The CUDA devices that a --device names by number; none for one without numbers."""
    return tuple(int(index) for index in device.partition(":")[2].split(",") if index)


@dataclass(frozen=True, slots=True)
class AvailableDevices:
    """Where models may run: `device` is what --device came to, `gpus` those that may be used, by number.

    `device` is `cpu`, `cuda:N`, or, for an instance on each of several, `cuda:N,M`.

    `why_no_gpu` says why there are none.
    """

    device: str = "cpu"
    gpus: tuple[int, ...] = ()
    why_no_gpu: str = "the server runs on the CPU"
