"""CUDA devices of the driver, and the choice of devices by --device."""

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
from tensorferry.server.system.install_command import install_command

_log = logging.getLogger("tensorferry.server")

# "0000:3b:00.0", with room for the longer domains of virtual machines.
_BUS_ID_BYTES = 32


def cuda_device_count() -> int:
    """Return the number of CUDA devices; 0 without a driver."""
    driver = _driver()
    count = ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def pci_bus_id(index: int) -> str | None:
    """Return the PCI bus id of a CUDA device; None if the driver does not report it.

    CUDA's numbers depend on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, which other interfaces ignore. Bus ids are the
    same everywhere.
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
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def choose_device(wanted: str) -> str:
    """Return `cpu`, `cuda:N` or `cuda:N,M` for a --device, which may also be `auto` or `cuda`.

    `auto` falls back to the CPU with one line in the log. StartError if a requested CUDA device does not exist.
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
        f"--device is {wanted!r}, but {missing}; use --device cpu, or auto to fall back to the CPU"
    )


def preload_libraries() -> None:
    """Make ONNX Runtime (1.21 and later) load CUDA and cuDNN libraries that are installed as Python packages.

    ONNX Runtime searches next to itself and in the system's folders, and prints missing libraries to stdout. The
    output goes to the log instead, because the parent process may read stdout. If libraries are missing, other folders
    with Python packages are searched too.
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
    """Load the libraries. Return ONNX Runtime's lines about those that are missing."""
    output = StringIO()
    with redirect_stdout(output):
        onnxruntime.preload_dlls(**options)
    return output.getvalue().splitlines()


def available_devices(wanted: str, device: str) -> AvailableDevices:
    """Return the devices that configurations may use. --device is `wanted`, which was resolved to `device`."""
    if wanted == "cpu":
        return AvailableDevices(device, (), "--device is cpu")
    missing = _why_no_cuda(gpu_indices(wanted))
    if missing is not None:
        return AvailableDevices(device, (), missing)
    return AvailableDevices(device, gpu_indices(wanted) or tuple(range(cuda_device_count())))


def _why_no_cuda(indices: tuple[int, ...]) -> str | None:
    """Return why these devices (by default the first one) cannot be used; None if they can."""
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return f"the installed onnxruntime has no CUDA provider ({install_command('gpu')} has it)"
    count = cuda_device_count()
    for index in indices or (0,):
        if index >= count:
            return f"there is no CUDA device {index} (the driver reports {count})"
    return None


def gpu_indices(device: str) -> tuple[int, ...]:
    """Return the numbers of CUDA devices in a --device."""
    return tuple(int(index) for index in device.partition(":")[2].split(",") if index)


@dataclass(frozen=True, slots=True)
class AvailableDevices:
    """Devices that models may use: `device` is the default, `gpus` lists the usable GPUs by number.

    `device` is `cpu`, `cuda:N`, or `cuda:N,M` for one instance on each of several GPUs. `why_no_gpu` explains why
    `gpus` is empty.
    """

    device: str = "cpu"
    gpus: tuple[int, ...] = ()
    why_no_gpu: str = "the server runs on the CPU"
