"""ONNX Runtime, which tells nobody what it runs: whoever needs it imports it from here.

Its official builds for Linux, since 1.29, send to Microsoft what models they load (their file names, graph names and
hashes among it), and keep what they could not send in the user's cache folder, unless a variable is set before it is
imported; its function `disable_telemetry_events` comes too late for the first of that.
"""

from __future__ import annotations

import os

# Who wants it says so by the same variable.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

__all__ = ["onnxruntime"]
