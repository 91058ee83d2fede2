"""What an error of ONNX Runtime says about the device: too little memory, or broken.

ONNX Runtime has no codes for it: its messages, and the CUDA libraries' in them, are read. They look like
`CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=... ; file=... ; line=... ; expr=...`.
"""

from __future__ import annotations

import enum
import re


class DeviceErrorKind(enum.Enum):
    """What is wrong: MEMORY does not suffice for these rows; the SESSION is broken; or the PROCESS cannot use the device again."""

    MEMORY = "memory"
    SESSION = "session"
    PROCESS = "process"


_MEMORY = re.compile(
    r"Failed to allocate memory for requested buffer"
    r"|Available memory of \d+ is smaller than requested bytes"
    r"|\bCUDA (?:failure|error) (?:2|701)\b"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|std::bad_alloc|\bbad allocation\b|\bout of memory\b",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\bCUDA (?:failure|error):? (\d+)\b", re.IGNORECASE)
# CUDA's documentation says of these that the process must be ended and started again.
_PROCESS = frozenset({700, 702, 710, 714, 715, 716, 717, 718, 719, 721})
# Of these it does not, but no run on the device succeeds after them: memory or link with errors that cannot be
# corrected, the device taken away or not there, its context destroyed, its multi-process service gone, unknown.
_SESSION = frozenset({46, 100, 101, 201, 214, 220, 709, 802, 805, 806, 807, 810, 999})
_PROCESS_WORDS = re.compile(
    r"an illegal memory access was encountered|unspecified launch failure|device-side assert triggered"
    r"|an illegal instruction was encountered|misaligned address|the launch timed out and was terminated"
    r"|hardware stack error|invalid program counter|operation not supported on global/shared address space",
    re.IGNORECASE,
)
_SESSION_WORDS = re.compile(
    r"(?:CUBLAS|CUDNN|CUSPARSE|CUFFT|CURAND|CUSOLVER)_STATUS_(?:NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
    r"|uncorrectable (?:ECC|NVLink) error|CUDA driver shutting down|no CUDA-capable device",
    re.IGNORECASE,
)


def classify_device_error(error: BaseException | None) -> DeviceErrorKind | None:
    """What an error says of the device; None when only of the request and the model."""
    if error is None:
        return None
    if isinstance(error, MemoryError):
        return DeviceErrorKind.MEMORY
    text = str(error)
    numbers = {int(number) for number in _NUMBER.findall(text)}
    if numbers & _PROCESS or _PROCESS_WORDS.search(text):
        return DeviceErrorKind.PROCESS
    # Before the others: without memory, libraries cannot be initialised either.
    if _MEMORY.search(text):
        return DeviceErrorKind.MEMORY
    if numbers & _SESSION or _SESSION_WORDS.search(text):
        return DeviceErrorKind.SESSION
    return None


def cuda_error_suffix(error: BaseException | None) -> str:
    """The CUDA error that a client may read of, in brackets behind a blank; empty when there is none."""
    number = _NUMBER.search(str(error))
    return f" (CUDA error {number[1]})" if number else ""
