"""ONNX Runtime without telemetry, and its messages. Every other module imports `onnxruntime` from here.

Since 1.29, official builds for Linux send Microsoft the file names, graph names and hashes of loaded models, and store
unsent reports in the user's cache folder. Only an environment variable that is set before the import prevents this:
`disable_telemetry_events` comes too late for the first report.
"""

from __future__ import annotations

import os
import re

# An operator can enable telemetry with the same variable.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

__all__ = ["onnxruntime", "ort_message"]


def ort_message(error: Exception) -> str:
    """Return the message of an exception of ONNX Runtime on one line, without the error code."""
    return " ".join(re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error)).split())
