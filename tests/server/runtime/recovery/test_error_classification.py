"""Classification of ONNX Runtime's messages into failures of the device and of requests."""

from __future__ import annotations

import pytest

from tensorferry.server.runtime.recovery.error_classification import (
    DeviceErrorKind,
    classify_device_error,
    cuda_error_suffix,
)

ARENA = (
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Mul node. Name:'' "
    "Status Message: bfc_arena.cc:376 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool) "
)


def cuda(number: int, text: str, library: str = "CUDA") -> str:
    return f"{library} failure {number}: {text} ; GPU=0 ; hostname=h ; file=cuda_call.cc ; line=1 ; expr=f(x)"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (ARENA + "Failed to allocate memory for requested buffer of size 939524096", DeviceErrorKind.MEMORY),
        (ARENA + "Available memory of 1024 is smaller than requested bytes of 4096", DeviceErrorKind.MEMORY),
        (cuda(2, "out of memory"), DeviceErrorKind.MEMORY),
        (cuda(3, "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS"), DeviceErrorKind.MEMORY),
        ("std::bad_alloc", DeviceErrorKind.MEMORY),
        (cuda(700, "an illegal memory access was encountered"), DeviceErrorKind.PROCESS),
        (cuda(710, "device-side assert triggered"), DeviceErrorKind.PROCESS),
        (cuda(719, "unspecified launch failure"), DeviceErrorKind.PROCESS),
        ("CUDA error executing cudaMemcpy: unspecified launch failure", DeviceErrorKind.PROCESS),
        (cuda(999, "unknown error"), DeviceErrorKind.SESSION),
        (cuda(214, "uncorrectable ECC error encountered"), DeviceErrorKind.SESSION),
        (cuda(8, "CUDNN_STATUS_EXECUTION_FAILED", "CUDNN"), DeviceErrorKind.SESSION),
        (cuda(13, "CUBLAS_STATUS_EXECUTION_FAILED", "CUBLAS"), DeviceErrorKind.SESSION),
        (cuda(9, "invalid configuration argument"), None),
        (cuda(3, "CUDNN_STATUS_BAD_PARAM", "CUDNN"), None),
        ("Gather node: indices element out of data bounds, idx=700 must be within the inclusive range", None),
        ("Exiting due to terminate flag being set to true.", None),
    ],
)
def test_messages(message: str, kind: DeviceErrorKind | None) -> None:
    assert classify_device_error(RuntimeError(message)) is kind


def test_other_errors_and_what_clients_get() -> None:
    assert classify_device_error(None) is None
    assert classify_device_error(MemoryError()) is DeviceErrorKind.MEMORY
    assert cuda_error_suffix(RuntimeError(cuda(700, "an illegal memory access"))) == " (CUDA error 700)"
    assert cuda_error_suffix(RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")) == ""
