"""Servers of a model, their status, and the time until they are ready."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from real_models.answers import Reference, outputs_of, same
from serving.measure import Bench
from serving.probe import WrongAnswer, infer
from serving.processes import Running
from serving.servers import HOST
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

_SESSION = """
import sys, time
import onnxruntime
began = time.perf_counter()
onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
print(time.perf_counter() - began)
"""


@contextmanager
def started(
    bench: Bench,
    reference: Reference,
    path: Path,
    *options: str,
    cache: Path | None = None,
    checks: bool = True,
) -> Iterator[tuple[Running, float]]:
    """Start a server; yield it with the seconds until its first right answer. Raises VisitError.

    `cache` keeps verdicts for later starts. Without `checks` it must only be ready.
    """
    port = bench.spare_port
    call, right = reference.calls[0], reference.outputs[0]
    message = call.message()

    def ready() -> None:
        if not checks:
            with grpc.insecure_channel(f"{HOST}:{port}") as channel:
                stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
                if not stub.ServerReady(pb.ServerReadyRequest(), timeout=1).ready:
                    raise WrongAnswer("not ready")
        elif not same(outputs_of(infer(message, port)), right):
            raise WrongAnswer("not the answer of ONNX Runtime alone")

    command = [sys.executable, "-m", "tensorferry.server", "serve", f"{call.model}={path}", "--host", HOST]
    command += ["--port", str(port), "--metrics-port", str(_status_port(port)), "--device", "cpu"]
    command += ["--log-level", "warning", *options]
    with tempfile.TemporaryDirectory() as fresh:
        variables = {"XDG_CACHE_HOME": str(cache or fresh)}
        with bench.command_started(command, port, "", variables, ready) as both:
            yield both


def _status_port(port: int) -> int:
    return port + 1


def status(serving: Running) -> Mapping[str, Any]:
    """Return what the server's status says of its model."""
    with urllib.request.urlopen(
        f"http://{HOST}:{_status_port(serving.port)}/status.json", timeout=20
    ) as answer:
        (model,) = json.load(answer)["models"]
    found: Mapping[str, Any] = model
    return found


def ready_seconds(bench: Bench, reference: Reference, path: Path) -> Mapping[str, float]:
    """Return the seconds of ONNX Runtime's session alone, and until the first answer: of a first start, and again."""
    words = [sys.executable, "-c", _SESSION, str(path)]
    session = float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return {"session_seconds": round(session, 3), **_two_starts(bench, reference, path)}


def ready_together(bench: Bench, models: Sequence[tuple[Reference, Path]]) -> Mapping[str, float]:
    """Return the seconds until one server of all the models is ready: of a first start, and again."""
    (first, path), *others = models
    words = [f"{reference.calls[0].model}={other}" for reference, other in others]
    return _two_starts(bench, first, path, *words, checks=False)


def _two_starts(
    bench: Bench, reference: Reference, path: Path, *options: str, checks: bool = True
) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        seconds = []
        for _ in range(2):
            with started(bench, reference, path, *options, cache=Path(cache), checks=checks) as (_, took):
                seconds.append(round(took, 2))
    return {"first_seconds": seconds[0], "again_seconds": seconds[1]}
