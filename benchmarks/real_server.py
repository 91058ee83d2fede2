"""A real server process on one core, and the real model that it serves.

For the end-to-end benchmarks: the model is an MLP with seeded random weights, the server chooses
its port, and the load comes from this process, on another core if the machine has two.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from gpu.cores import on_cores
from tensorferry.protos import inference_pb2 as pb

INPUT_WIDTH, OUTPUT_WIDTH = 64, 8
MODEL = "mlp"
PROGRAM = ("-m", "tensorferry.server")
_STOP_SECONDS = 30

Array = npt.NDArray[Any]


def build_mlp(path: Path, layers: int, width: int, positions: int = 1, seed: int = 1) -> None:
    """Write an ONNX model of `layers` dense layers, with ReLU between: [n, p, 64] to [n, p, 8].

    A row has p positions that go through the same layers, as the words of a text would.
    """
    random = np.random.default_rng(seed)
    sizes = [INPUT_WIDTH, *[width] * (layers - 1), OUTPUT_WIDTH]
    nodes, weights, last = [], [], "x"
    for at in range(layers):
        shape = (sizes[at], sizes[at + 1])
        weight = random.standard_normal(shape, np.float32) * np.float32(np.sqrt(2 / sizes[at]))
        weights.append(numpy_helper.from_array(weight, f"w{at}"))
        if at < layers - 1:
            nodes.append(helper.make_node("MatMul", [last, f"w{at}"], [f"dense{at}"]))
            nodes.append(helper.make_node("Relu", [f"dense{at}"], [last := f"relu{at}"]))
        else:
            nodes.append(helper.make_node("MatMul", [last, f"w{at}"], ["y"]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", positions, INPUT_WIDTH])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", positions, OUTPUT_WIDTH])
    model = helper.make_model(
        helper.make_graph(nodes, MODEL, [x], [y], weights), opset_imports=[helper.make_opsetid("", 17)]
    )
    model.ir_version = 9  # The newest version that ONNX Runtime 1.20 reads.
    onnx.save(model, str(path))


def examples(count: int, positions: int = 1, seed: int = 2) -> Array:
    """Return `count` rows of input."""
    return np.random.default_rng(seed).standard_normal((count, positions, INPUT_WIDTH), np.float32)


def request_bytes(rows: Array) -> bytes:
    """Return a serialised ModelInferRequest."""
    request = pb.ModelInferRequest(model_name=MODEL, raw_input_contents=[rows.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=rows.shape)
    return request.SerializeToString()


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores of server and load; None if the machine has only one core."""

    server: int | None
    load: int | None

    @classmethod
    def split(cls) -> Cores:
        """Return the first core for the server and the last for the load."""
        allowed = sorted(os.sched_getaffinity(0))
        return cls(allowed[0], allowed[-1]) if len(allowed) > 1 else cls(None, None)

    def __str__(self) -> str:
        if self.server is None:
            return "one core for server and load: the load takes time from the server, mistrust the figures"
        return f"server on core {self.server}, load on core {self.load}"


def pin(pid: int, *cores: int | None) -> None:
    """Move every thread of a process to these cores, because ONNX Runtime places its threads itself."""
    if wanted := {core for core in cores if core is not None}:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):  # The thread has ended meanwhile.
                os.sched_setaffinity(int(thread), wanted)


class ServerError(Exception):
    """A server cannot be measured, with the reason."""


@dataclass(frozen=True, slots=True)
class RealServer:
    """A running server: its process, its ready line, and the file of its log."""

    process: subprocess.Popen[bytes]
    ready: Mapping[str, Any]
    log: Path

    @property
    def address(self) -> str:
        """The address of gRPC."""
        return str(self.ready["address"])


@contextmanager
def serving(
    model: Path, core: int | None, *options: str, program: Sequence[str] = PROGRAM
) -> Iterator[RealServer]:
    """Run `tensorferry serve` with the CPU on a core until the block ends; raise ServerError if it does not start.

    `model` is an ONNX model, or a file with Python models, which has their names.
    """
    served = str(model) if model.suffix == ".py" else f"{MODEL}={model}"
    cores = os.sched_getaffinity(0) if core is None else {core}
    with started(cores, served, "--device", "cpu", *options, program=program) as server:
        pin(server.process.pid, core)
        yield server


@contextmanager
def started(
    cores: Collection[int], *words: str, program: Sequence[str] = PROGRAM, patience: float = 600
) -> Iterator[RealServer]:
    """Run `tensorferry serve WORDS` on these cores until the block ends. ServerError if it is not ready in `patience` seconds."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TENSORFERRY_")}
    command = [sys.executable, *program, "serve", *words, "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as said, on_cores(cores):
            process = subprocess.Popen(
                [*command, "--log-format", "json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                env=environment,
                # Ctrl-C ends the load; the load then stops the server.
                start_new_session=True,
            )
        assert process.stdout is not None
        too_long = threading.Timer(patience, process.kill)
        try:
            too_long.start()
            line = process.stdout.readline()
            too_long.cancel()
            if not line:
                raise ServerError(f"the server did not start: {log.read_text(errors='replace')[-1500:]}")
            yield RealServer(process, json.loads(line), log)
        finally:
            too_long.cancel()
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    # An overloaded server drains for a long time; the second signal ends it at once.
    timer = threading.Timer(_STOP_SECONDS, process.kill)
    timer.start()
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(2)
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()
    timer.cancel()
    if process.stdout is not None:
        process.stdout.close()


def bench(address: str, rows: Path, core: int | None, *words: object) -> dict[str, Any]:
    """Run `tensorferry bench` with one process on a core, and return its only step."""
    (step,) = bench_steps(address, rows, core, *words)
    return step


def bench_steps(address: str, rows: Path, core: int | None, *words: object) -> list[dict[str, Any]]:
    """Run `tensorferry bench` with one process on a core, and return its steps."""
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        command = [*pinned, sys.executable, "-m", "tensorferry.server", "bench", address, MODEL]
        command += ["--processes", "1", "--input", f"x={rows}", "--json", str(results), *map(str, words)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        # It fails, but writes the file, if no request was answered.
        if not results.exists():
            raise RuntimeError(f"tensorferry bench ended with {done.returncode}: {done.stdout}")
        return list(json.loads(results.read_text())["steps"])
