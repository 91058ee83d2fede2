"""Settings of every peer, and the engine that each of them runs: the same session or function everywhere.

Peers run in their own environments, so this module imports nothing of tensorferry.
"""

from __future__ import annotations

import os
import runpy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

HOST = "127.0.0.1"
_WRITE_SECONDS = 0.2

Array = npt.NDArray[Any]


def _said(name: str, default: str) -> str:
    return os.environ.get(f"SERVING_BENCH_{name}", default)


MODEL_PATH = Path(_said("MODEL", "model.onnx"))
MODEL_NAME = MODEL_PATH.stem
PORT = int(_said("PORT", "9001"))
WINDOW_MS = float(_said("WINDOW_MS", "2"))
MAX_BATCH_SIZE = int(_said("MAX_BATCH_SIZE", "32"))
FOLDER = Path(_said("FOLDER", ""))
COUNTED = bool(_said("FOLDER", ""))


def session_options() -> Any:
    """Return the options of this server's session on one core: one thread without spinning."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


class Tensor(NamedTuple):
    """Input or output of a function, as a session of ONNX Runtime describes its own."""

    name: str
    shape: list[Any]
    type: str = "tensor(float)"


class Engine:
    """ONNX Runtime with the model, or the Python function of a file; it is named as the file.

    Counts its batches in a file of FOLDER, if one is given.
    """

    def __init__(self, path: Path = MODEL_PATH) -> None:
        self.input: Any
        self.output: Any
        self._compute: Callable[[Array], Any]
        if path.suffix == ".py":
            module = runpy.run_path(str(path))
            self._compute = module[path.stem]
            self.input, self.output = (Tensor(name, ["n", module["WIDTH"]]) for name in "xy")
        else:
            self._open(path)
        self.dtype = np.dtype(np.int64 if "int64" in self.input.type else np.float32)
        self._rows = self._batches = 0
        self._written = time.monotonic()

    def _open(self, path: Path) -> None:
        import onnxruntime

        session = onnxruntime.InferenceSession(
            str(path), session_options(), providers=["CPUExecutionProvider"]
        )
        self.input, self.output = session.get_inputs()[0], session.get_outputs()[0]
        self._compute = lambda rows: session.run([self.output.name], {self.input.name: rows})[0]

    def run(self, rows: Array) -> Array:
        """Run one batch, with rows on axis 0."""
        self._count(len(rows))
        return np.asarray(self._compute(rows))

    def run_bytes(self, rows: Sequence[bytes]) -> list[bytes]:
        """Run one batch of rows as bytes, and return each row's output."""
        return [row.tobytes() for row in self.run(self.array(b"".join(rows), len(rows)))]

    def array(self, raw: bytes, rows: int) -> Array:
        """Return `rows` rows of input."""
        return np.frombuffer(raw, self.dtype).reshape(rows, -1)

    def _count(self, rows: int) -> None:
        self._rows += rows
        self._batches += 1
        now = time.monotonic()
        if COUNTED and now - self._written > _WRITE_SECONDS:
            self._written = now
            # Replace the file at once, because it is read meanwhile.
            part = FOLDER / f"part.{os.getpid()}"
            part.write_text(f"{self._rows} {self._batches}")
            part.rename(FOLDER / f"batches.{os.getpid()}")
