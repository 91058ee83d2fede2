"""Classification of ONNX Runtime errors: out of memory, or a failed device.

ONNX Runtime has no error codes for this, so its messages are matched, and those of CUDA libraries in them:
`CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=... ; file=... ; line=... ; expr=...`.
"""

from __future__ import annotations

import enum
import re


class DeviceErrorKind(enum.Enum):
    """Kind of failure: not enough MEMORY for these rows, the SESSION is broken, or the PROCESS can never use the device again."""

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
# According to CUDA's documentation, the process must be restarted after these.
_PROCESS = frozenset({700, 702, 710, 714, 715, 716, 717, 718, 719, 721})
# No run of the session succeeds after these: uncorrectable memory or link errors, a missing or removed device, a
# destroyed context, a stopped multi-process service, an unknown error.
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
    """Return the kind of device failure that an error reports; None if the request or the model is at fault."""
    if error is None:
        return None
    if isinstance(error, MemoryError):
        return DeviceErrorKind.MEMORY
    text = str(error)
    numbers = {int(number) for number in _NUMBER.findall(text)}
    if numbers & _PROCESS or _PROCESS_WORDS.search(text):
        return DeviceErrorKind.PROCESS
    # Checked first, because libraries also report a failed initialisation when memory runs out.
    if _MEMORY.search(text):
        return DeviceErrorKind.MEMORY
    if numbers & _SESSION or _SESSION_WORDS.search(text):
        return DeviceErrorKind.SESSION
    return None


def cuda_error_suffix(error: BaseException | None) -> str:
    """Return the CUDA error number as a suffix for clients, like " (CUDA error 700)"; empty if there is none."""
    number = _NUMBER.search(str(error))
    return f" (CUDA error {number[1]})" if number else ""
