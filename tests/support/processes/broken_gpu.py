"""`tensorferry` on a GPU that breaks for real, once something is written to the FIFO named by
BROKEN_GPU.

A kernel then writes to address 0 in the context of ONNX Runtime's kernels. From then on every CUDA
call of the process fails, as after a bug in a kernel.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path
from typing import Any

FIFO = "BROKEN_GPU"

_PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry broken()
{
    .reg .b32 %r;
    .reg .b64 %a;
    mov.b32 %r, 1;
    mov.b64 %a, 0;
    st.global.b32 [%a], %r;
    ret;
}
"""


def break_gpu(driver: Any, index: int = 0) -> int:
    """Break the process's context on a device; return the driver's error code, 0 if it is not broken."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    one, nothing = ctypes.c_uint(1), ctypes.c_void_p()
    for call, *arguments in (
        (driver.cuInit, 0),
        (driver.cuDeviceGet, ctypes.byref(device), index),
        (driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), device),
        (driver.cuCtxPushCurrent_v2, context),
        (driver.cuModuleLoadData, ctypes.byref(module), ctypes.c_char_p(_PTX)),
        (driver.cuModuleGetFunction, ctypes.byref(kernel), module, ctypes.c_char_p(b"broken")),
        (driver.cuLaunchKernel, kernel, *[one] * 6, ctypes.c_uint(0), nothing, nothing, nothing),
    ):
        if result := call(*arguments):
            raise RuntimeError(f"{call.__name__} says {result}")
    return int(driver.cuCtxSynchronize())


def _break_when_told(fifo: Path) -> None:
    # Opening blocks until a writer opens it.
    fifo.read_bytes()
    try:
        said = break_gpu(ctypes.CDLL("libcuda.so.1"))
    except BaseException as error:
        said = 0
        print(f"the GPU could not be broken: {error!r}", file=sys.stderr, flush=True)
    print(f"the GPU is broken: CUDA error {said}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    from tensorferry.server.__main__ import main

    threading.Thread(
        target=_break_when_told, args=(Path(os.environ[FIFO]),), name="breaks", daemon=True
    ).start()
    sys.exit(main())
