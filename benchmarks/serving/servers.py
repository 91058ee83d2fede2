"""All measured servers: how each is started, its protocol, and where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serving.encodings import JSON, JSON_ROWS, MSGPACK, RAW, V2, HttpEncoding
from serving.workloads import Workload

HOST = "127.0.0.1"
MAX_BATCH_SIZE = 32
# One thread per stream, because a thread serves one call at a time. With fewer calls fewer threads
# are faster.
ECHO_THREADS, ECHO_STREAM_THREADS = 8, 160

LANE, THREADED, HTTP = "tensorferry lane", "tensorferry threaded", "tensorferry HTTP"
ECHO, ECHO_STREAMS, ECHO_ASYNCIO = "threaded echo", "threaded echo with a thread per stream", "asyncio echo"
TRITON, TRITON_WINDOW, MOSEC = "Triton", "Triton 2 ms window", "mosec"
MLSERVER, LITSERVE, BENTOML, RAY, PYTRITON = "MLServer", "LitServe", "BentoML", "Ray Serve", "PyTriton"
OURS = (LANE, THREADED)
SLOW_PEERS = (MLSERVER, BENTOML, LITSERVE, RAY, PYTRITON)

Command = Callable[[Path, Workload, Path, int], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Server:
    """One server. `peer` is its environment below `peers/`; "" means this repository."""

    name: str
    command: Command
    peer: str = ""
    http: HttpEncoding | None = None
    http_path: str = "/"
    """Path of requests, perhaps with the place of the model's name."""
    streams: bool = False
    window_ms: float = 2
    """Batching window in milliseconds, for servers that have such a setting."""
    windows_ms: Mapping[str, float] = field(default_factory=dict)
    """Windows of single models, which batch badly with the general one."""

    def installed(self, cache: Path) -> bool:
        """Return whether it can be started."""
        return not self.peer or (cache / "peers" / f"{self.peer}.requirements").exists()

    def window(self, workload: Workload) -> float:
        """Return the batching window for this model, in milliseconds."""
        return self.windows_ms.get(workload.model, self.window_ms)


def _ours(transport: str, *, http: bool = False) -> Command:
    def command(python: Path, workload: Workload, model: Path, port: int) -> Sequence[str]:
        served = model.with_name("app.py") if workload.function else f"{workload.model}={model}"
        serve = ["-m", "tensorferry.server", "serve", str(served), "--host", HOST]
        ports = ["--port", str(port + http), *(["--http-port", str(port)] if http else [])]
        options = [*ports, "--device", "cpu", "--max-batch-size", str(MAX_BATCH_SIZE)]
        return [str(python), *serve, *options, "--transport", transport, "--log-level", "warning"]

    return command


def _module(name: str, *words: str) -> Command:
    def command(python: Path, workload: Workload, model: Path, port: int) -> Sequence[str]:
        return [str(python), "-m", f"serving.peers.{name}", *words]

    return command


def _bentoml(python: Path, workload: Workload, model: Path, port: int) -> Sequence[str]:
    serve = [str(python), "-m", "bentoml", "serve", "serving.peers.bentoml_peer:Model"]
    return [*serve, "--host", HOST, "--port", str(port)]


def _mosec(python: Path, workload: Workload, model: Path, port: int) -> Sequence[str]:
    address = ["--address", HOST, "--port", str(port)]
    return [
        *_module("mosec_peer")(python, workload, model, port), *address, "--timeout", "60000",
        "--log-level", "warning",
    ]  # fmt: skip


def servers() -> Mapping[str, Server]:
    """Return all servers by name."""
    echo = str(ECHO_THREADS), str(ECHO_STREAM_THREADS)
    all_servers = (
        Server(LANE, _ours("lane"), streams=True),
        Server(THREADED, _ours("threaded"), streams=True),
        Server(HTTP, _ours("lane", http=True), http=V2, http_path="/v2/models/{model}/infer"),
        Server(ECHO, _module("echo", "threaded", echo[0]), streams=True),
        Server(ECHO_STREAMS, _module("echo", "threaded", echo[1]), streams=True),
        Server(ECHO_ASYNCIO, _module("echo", "asyncio"), streams=True),
        Server(TRITON, _module("triton_peer"), "triton", streams=True, window_ms=0),
        Server(TRITON_WINDOW, _module("triton_peer"), "triton", streams=True),
        Server(MOSEC, _mosec, "mosec", MSGPACK, "/inference"),
        Server(MLSERVER, _module("mlserver_peer"), "mlserver", windows_ms={"mlp": 10, "transformer": 30}),
        Server(LITSERVE, _module("litserve_peer"), "litserve", JSON, "/predict", windows_ms={"mlp": 10}),
        Server(BENTOML, _bentoml, "bentoml", JSON_ROWS, "/predict"),
        Server(RAY, _module("ray_peer"), "ray", RAW),
        Server(PYTRITON, _module("pytriton_peer"), "triton"),
    )
    return {server.name: server for server in all_servers}
