"""`make gpu-check`, of what goes wrong: a GPU that is out of memory, and one that is broken, for real.

A server in a process of its own is under load from several clients meanwhile. Counted is how each request ends: with
the right answer, or with a status; a wrong answer, or none, is what must not be.
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
# Of a row: 4 bytes for each of `WIDTH` numbers, so 64 rows take 256 MiB, and more than once.
WIDTH = 1 << 20
LIMIT = "192MiB"
RIGHT, WRONG = "right", "WRONG"


@dataclass(frozen=True, slots=True)
class Machine:
    """How a server is started on the device: further arguments, the program, and its environment."""

    arguments: tuple[str, ...]
    program: Sequence[str] | None = None
    variables: Mapping[str, str] | None = None

    def serve(self, model: Path, *arguments: str) -> ServerProcess:
        """A server with one model, by the name of its file."""
        return ServerProcess.start(
            model,
            *("--max-batch-size", str(MOST), "--batching", "trust", *self.arguments, *arguments),
            transport="lane",
            program=self.program,
            variables=self.variables,
        )


def infer(stub: Any, mark: float, rows: int) -> str:
    """`right`, `WRONG`, or the name of the status."""
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
    """Requests of one to nine rows from several clients. How they ended.

    What `breaks` the device is called amid them; each client then goes on until a request of its fails.
    """
    ended: Counter[str] = Counter()
    # Guards ended.
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
    """What is wrong: every request must be answered, though no full batch fits."""
    model = small.wide(folder / "wide.onnx", width)
    server = machine.serve(model)
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        # More than fits, whoever else is there.
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
    """What is wrong: every request must end, the server too, and the next one serve."""
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
    """What is wrong on a GPU."""
    wrong = out_of_memory(folder, Machine(("--device", device, "--cuda-memory-bytes", LIMIT)))
    fifo = folder / "break"
    os.mkfifo(fifo)
    machine = Machine(
        ("--device", device), [sys.executable, broken_gpu.__file__], {broken_gpu.FIFO: str(fifo)}
    )
    return wrong + lost(folder, machine, lambda server: _tell(fifo))


def _tell(fifo: Path) -> None:
    # Not kept waiting, should nobody be there to read.
    writer = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    os.write(writer, b"now")
    os.close(writer)
