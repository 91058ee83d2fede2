"""`make gpu-check`: a GPU that is out of memory, and one that breaks, for real.

A server process is under load from several clients meanwhile. The counts are by outcome: the right
answer, or a status. A wrong or missing answer is a failure.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from support.models import small
from support.processes import broken_gpu
from support.processes.server import ServerProcess

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

CLIENTS, REQUESTS, MOST = 8, 30, 64
PATIENCE = 60.0
# A row has 4 bytes for each of `WIDTH` numbers, so 64 rows take 256 MiB, several times.
WIDTH = 1 << 20
LIMIT = "192MiB"
RIGHT, WRONG = "right", "WRONG"


@dataclass(frozen=True, slots=True)
class Machine:
    """Start of a server on the device: arguments, program, and environment."""

    arguments: tuple[str, ...]
    program: Sequence[str] | None = None
    variables: Mapping[str, str] | None = None

    def serve(self, model: Path, *arguments: str) -> ServerProcess:
        """Run a server with one model, named after its file."""
        return ServerProcess.start(
            model,
            *("--max-batch-size", str(MOST), "--batching", "trust", *self.arguments, *arguments),
            transport="lane",
            program=self.program,
            variables=self.variables,
        )


def infer(stub: Any, mark: float, rows: int) -> str:
    """Return `right`, `WRONG`, or the name of the status."""
    x = np.full((rows, 1), mark, np.float32)
    request = pb.ModelInferRequest(model_name="wide")
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    request.raw_input_contents.append(x.tobytes())
    try:
        response = stub.ModelInfer(request, timeout=PATIENCE)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code.name
    y = np.frombuffer(response.raw_output_contents[0], np.float32)
    return RIGHT if np.array_equal(y, x[:, 0]) else WRONG


def load(
    server: ServerProcess, count: int = REQUESTS, breaks: Callable[[], None] | None = None
) -> Counter[str]:
    """Send requests of one to nine rows from several clients; return their outcomes.

    `breaks` is called in between; each client then continues until one of its requests fails.
    """
    ended: Counter[str] = Counter()
    # Guards outcomes.
    lock = threading.Lock()
    until = time.monotonic() + PATIENCE

    def run(client: int) -> None:
        with grpc.insecure_channel(server.address, [("grpc.enable_retries", 0)]) as channel:
            stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            for number in itertools.count():
                if breaks is not None and client == 0 and number == count // 3:
                    breaks()
                what = infer(stub, float(100 * client + number % 100), rows=(1, 9, 2, 5)[number % 4])
                with lock:
                    ended[what] += 1
                if number + 1 >= count and (breaks is None or what != RIGHT or time.monotonic() > until):
                    return

    with ThreadPoolExecutor(CLIENTS) as clients:
        for future in [clients.submit(run, client) for client in range(CLIENTS)]:
            future.result()
    return ended


def out_of_memory(folder: Path, machine: Machine, width: int = WIDTH) -> list[str]:
    """Return failures: every request must be answered, though no full batch fits."""
    model = small.wide(folder / "wide.onnx", width)
    server = machine.serve(model)
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        # More than fits, whatever else uses the GPU.
        ended = Counter({"all rows at once": 1}) if infer(stub, 7.0, MOST) != RIGHT else Counter()
        ended += load(server)
        ended += Counter({"all rows again": 1}) if infer(stub, 7.0, MOST) != RIGHT else Counter()
    code = server.stop()
    print(f"gpu-check: out of memory: {_said(ended)}; the server ended with code {code}")
    wrong = [f"out of memory: {what}, {number} times" for what, number in ended.items() if what != RIGHT]
    if not any("does not fit into the memory" in line for line in server.log):
        wrong.append("out of memory: the memory sufficed, so nothing was shown")
    return wrong + ([f"out of memory: the server ended with code {code}"] if code else [])


def lost(folder: Path, machine: Machine, break_device: Callable[[ServerProcess], None]) -> list[str]:
    """Return failures: every request and the server must end, and the next server must serve."""
    model = small.wide(folder / "wide.onnx", 1)
    wrong = []
    server = machine.serve(model, "--exit-on-device-loss", "--drain-seconds", "5")
    ended = load(server, breaks=lambda: break_device(server))
    code = server.wait() if ended["UNAVAILABLE"] else server.stop()
    print(f"gpu-check: a broken device: {_said(ended)}; the server ended with code {code}")
    wrong += [
        f"a broken device: {what}, {number} times"
        for what, number in ended.items()
        if what not in (RIGHT, "UNAVAILABLE")
    ]
    if not ended["UNAVAILABLE"]:
        wrong.append("a broken device: nothing failed, so nothing was shown")
    if code != 1:
        wrong.append(
            f"a broken device: the server ended with code {code}, not with 1: {''.join(server.log[-5:])}"
        )
    after = machine.serve(model)
    ended, code = load(after, 3), after.stop()
    print(f"gpu-check: a server after the broken one: {_said(ended)}")
    if set(ended) != {RIGHT} or code:
        wrong.append(f"a server after the broken one: {_said(ended)}, ended with code {code}")
    return wrong


def _said(ended: Counter[str]) -> str:
    return ", ".join(f"{number} {what}" for what, number in sorted(ended.items()))


def check(device: str, folder: Path) -> list[str]:
    """Return the failures on a GPU."""
    wrong = out_of_memory(folder, Machine(("--device", device, "--cuda-memory-bytes", LIMIT)))
    fifo = folder / "break"
    os.mkfifo(fifo)
    machine = Machine(
        ("--device", device), [sys.executable, broken_gpu.__file__], {broken_gpu.FIFO: str(fifo)}
    )
    return wrong + lost(folder, machine, lambda server: _tell(fifo))


def _tell(fifo: Path) -> None:
    # Does not block if nothing reads it.
    writer = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    os.write(writer, b"now")
    os.close(writer)
