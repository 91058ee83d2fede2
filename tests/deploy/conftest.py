from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from deploy.promql import Page, page_of
from support.models import small
from support.processes.probe import WAIT_SECONDS, request
from support.processes.server import ServerProcess

from tensorferry.client import InferenceClient
from tensorferry.protos import inference_pb2_grpc

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
NOT_KEPT = "0af7651916cd43dd8448eb211c80319c"


def scrape(server: ServerProcess, accept: str = "") -> tuple[str, str]:
    """Return the page and its content type."""
    asked = urllib.request.Request(server.ready["metrics"], headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(asked, timeout=WAIT_SECONDS) as response:
        return response.read().decode(), response.headers["Content-Type"]


APP = """from tensorferry.serving import onnx
total = onnx("total.onnx", name="total", states={"past": "next"})
"""


@pytest.fixture(scope="module")
def server(
    transport: str, probe_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server that has answered some requests, one of them traced, and a sequence, and refused a request."""
    folder = tmp_path_factory.mktemp("stateful")
    text = "(float[n, 1] x, float[n, 1] past) => (float[n, 1] y, float[n, 1] next) { next = Add (past, x) y = Neg (next) }"
    small.written(folder / "total.onnx", text)
    (folder / "app.py").write_text(APP)
    models = (probe_model, folder / "app.py")
    server = ServerProcess.start(*models, "--cache", "1MiB", "--metrics-port", "0", transport=transport)
    with InferenceClient(server.address) as client, client.sequence("total") as sequence:
        sequence.infer({"x": np.ones((1, 1), np.float32)})
    with grpc.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        for number, (trace, flags) in enumerate(((None, ""), (NOT_KEPT, "00"), (TRACE, "01"))):
            metadata = [("traceparent", f"00-{trace}-00f067aa0ba902b7-{flags}")] if trace else []
            stub.ModelInfer(request(number, rows=number + 1), timeout=WAIT_SECONDS, metadata=metadata)
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(request(9, model="other"), timeout=WAIT_SECONDS)
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def page(server: ServerProcess) -> Page:
    return page_of(scrape(server)[0])
