"""Content of each request, and its own right answer.

A row of `x` has its sender, the sender's number of the request, its place in the request, and the
fault to cause; the model is y = 3 x + 1, exactly. That of sequences adds the rows of a sequence.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import numpy as np
from support.models.small import written

from tensorferry.protos import inference_pb2 as pb

FACTOR, OFFSET = 3, 1
# The model of sequences.
SUMS = "sums"
COLUMNS = 4
# A sequence ends after so long without a request.
IDLE_SECONDS = 8


class Mark(enum.IntEnum):
    """Fault that a request causes; its neighbours must not notice."""

    NONE = 0
    RAISE = 1  # The model raises.
    SHAPE = 2  # The model returns a row too few.
    BREAK = 3  # The device breaks, once.
    HANG = 4  # The run does not return for a while, once.
    LEAK = 5  # The model keeps a megabyte.
    FALL = 6  # A worker's own code raises SystemExit, once.
    EXIT = 7  # The model raises SystemExit.
    ABORT = 8  # The process of the model aborts.


# Faults after which the request itself, and no other, may get INTERNAL.
AT_FAULT = frozenset({Mark.RAISE, Mark.SHAPE, Mark.EXIT, Mark.ABORT})


def write_model(path: Path) -> Path:
    """Write the model, y = 3 x + 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = f"float[batch, {COLUMNS}]"
    text = f"({rows} x) => ({rows} y) {{ scaled = Mul (x, factor) y = Add (scaled, offset) }}"
    return written(path, text, factor=np.float32(FACTOR), offset=np.float32(OFFSET))


def write_app(folder: Path) -> Path:
    """Write the app of a function that computes the same in processes of its own."""
    path = folder / "app.py"
    path.write_text(
        "from tensorferry.serving import FP32, model\n\n\n"
        f'@model(inputs={{"x": FP32[-1, {COLUMNS}]}}, outputs={{"y": FP32[-1, {COLUMNS}]}}, processes=2)\n'
        f"def function(x):\n    return {FACTOR} * x + {OFFSET}\n"
    )
    return path


def write_sums(folder: Path) -> None:
    """Write the model of sequences, y = the sum of all x of the sequence, into its folder of a repository."""
    version = folder / "1"
    version.mkdir(parents=True, exist_ok=True)
    rows = f"float[batch, {COLUMNS}]"
    text = (
        f"({rows} x, {rows} past) => ({rows} y, {rows} next) {{ next = Add (past, x) y = Identity (next) }}"
    )
    state = f'input_name: "past" output_name: "next" data_type: TYPE_FP32 dims: {COLUMNS}'
    idle = f"max_sequence_idle_microseconds: {IDLE_SECONDS}000000"
    config = folder / "config.new"
    config.write_text(f"max_batch_size: 32 sequence_batching {{ {idle} state {{ {state} }} }}\n")
    # Servers read the files at any time.
    config.rename(folder / "config.pbtxt")
    written(version / "model.new", text).rename(version / "model.onnx")


def rows_of(sender: int, number: int, rows: int, mark: Mark = Mark.NONE) -> Any:
    """Return the input of a request."""
    x = np.empty((rows, COLUMNS), np.float32)
    x[:, 0], x[:, 1], x[:, 2], x[:, 3] = sender, number, np.arange(rows), mark
    return x


def request(model: str, sender: int, number: int, rows: int, mark: Mark = Mark.NONE) -> pb.ModelInferRequest:
    """Return the request."""
    x = rows_of(sender, number, rows, mark)
    message = pb.ModelInferRequest(model_name=model, id=f"{sender}.{number}")
    message.inputs.add(name="x", datatype="FP32", shape=x.shape)
    message.raw_input_contents.append(x.tobytes())
    return message


def verdict(
    message: pb.ModelInferResponse, sender: int, number: int, rows: int, mark: Mark = Mark.NONE
) -> str:
    """Return OK if the answer is this request's; else CROSSED or WRONG, and what it was."""
    return verdict_of(
        np.frombuffer(message.raw_output_contents[0], np.float32).reshape(-1, COLUMNS),
        message.id,
        rows_of(sender, number, rows, mark),
        f"{sender}.{number}",
    )


def verdict_of(y: Any, answered_id: str, x: Any, sent_id: str) -> str:
    """Return the verdict on arrays."""
    if answered_id == sent_id and y.shape == x.shape and (y == FACTOR * x + OFFSET).all():
        return "OK"
    theirs = ((y - OFFSET) / FACTOR)[:, :2].tolist()
    return f"CROSSED({answered_id}:{theirs})" if answered_id != sent_id or y.size else "WRONG(empty)"
