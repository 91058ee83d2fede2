"""MLServer and KServe's Python server as processes, each in its own environment, with two models.

`double` answers y = 2 x and names its tensors: FP32 [-1, 3]. `undeclared` does the same, and names none, as models
of these servers do unless their author adds the names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.processes.free_ports import free_ports
from support.processes.server import environment
from support.wire.programs import CLIENTS, needs

from serving.processes import running
from serving.run import cache_folder
from serving.servers import MLSERVER, servers
from tensorferry.client import InferenceClient

_HERE = Path(__file__).parent
# Importing all of MLServer takes many seconds on a busy machine.
_START_SECONDS = 100.0

Ports = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Foreign:
    """A kind of server. `command` writes its settings to a folder, and returns its command line; gRPC has the first port."""

    name: str
    command: Callable[[Path, Ports], Sequence[str]]
    installed: pytest.MarkDecorator


def _mlserver(folder: Path, ports: Ports) -> Sequence[str]:
    grpc_port, http_port, metrics_port = ports
    settings = {
        "host": "127.0.0.1", "grpc_port": grpc_port, "http_port": http_port, "metrics_port": metrics_port,
        "parallel_workers": 0, "debug": False,
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings))
    tensor = {"datatype": "FP32", "shape": [-1, 3]}
    names = {
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}],
        "versions": ["7"],
        "platform": "numpy",
        "parameters": {"version": "7", "content_type": "np"},
    }
    for model, more in (("double", names), ("undeclared", {})):
        (folder / model).mkdir()
        described = {"name": model, "implementation": "mlserver_models.Double", **more}
        (folder / model / "model-settings.json").write_text(json.dumps(described))
    return [str(cache_folder() / "peers" / "mlserver" / "bin" / "mlserver"), "start", str(folder)]


def _kserve(folder: Path, ports: Ports) -> Sequence[str]:
    python = CLIENTS / "kserve" / "bin" / "python"
    assert python.exists(), "CI needs KServe: make tools"
    return [str(python), str(_HERE / "kserve_server.py"), *map(str, ports[:2])]


FOREIGN = {
    "mlserver": Foreign(
        "mlserver",
        _mlserver,
        pytest.mark.skipif(
            not servers()[MLSERVER].installed(cache_folder()),
            reason="MLServer is not installed: make bench-peers installs it",
        ),
    ),
    "kserve": Foreign("kserve", _kserve, needs(CLIENTS / "kserve" / ".done")),
}


@contextmanager
def started(foreign: Foreign, folder: Path) -> Iterator[str]:
    """Run a server until the block ends; yield its address once it is ready."""
    grpc_port, http_port, metrics_port = free_ports(3)
    ports = (grpc_port, http_port, metrics_port)
    variables = {**environment(), "PYTHONPATH": str(_HERE), "PYTHONUNBUFFERED": "1"}
    command = foreign.command(folder, ports)
    with running(command, variables, folder, os.sched_getaffinity(0), ports[0]) as server:
        address = f"127.0.0.1:{ports[0]}"
        with InferenceClient(address) as client:
            assert client.wait_ready(_START_SECONDS), server.log()
        yield address
