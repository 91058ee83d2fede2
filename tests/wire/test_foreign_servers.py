"""The client and its commands against real servers of other projects: MLServer, and KServe's Python server.

Neither has statistics, shared memory or tensorferry's streams; KServe's does not list its models. Triton's server is
in tests/e2e/clients/test_bench.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.wire.foreign_servers import FOREIGN, started

from tensorferry.client import InferenceClient, InferenceError, InvalidInput, NotFound, Unimplemented
from tensorferry.client.cli import bench, commands, infer

X = np.array([[1, 2.5, -3]], np.float32)
# An open loop waits for the answers to all requests of its half second.
TWENTY = ["--rate", "20", "--arrivals", "constant"]
SHORT = ["--duration", "0.5", "--warmup", "0.1", "--processes", "1"]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server of another project."""

    kind: str
    address: str


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=foreign.installed) for kind, foreign in FOREIGN.items()]
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the models `double` and `undeclared`."""
    with started(FOREIGN[request.param], tmp_path_factory.mktemp(request.param)) as address:
        yield Server(request.param, address)


@pytest.fixture
def row(tmp_path: Path) -> str:
    """The name of a file with a row."""
    np.save(tmp_path / "row.npy", X)
    return str(tmp_path / "row.npy")


def benched(server: Server, model: str, folder: Path, *arguments: str) -> dict[str, Any]:
    path = folder / "results.json"
    assert bench.main([server.address, model, *SHORT, *arguments, "--json", str(path)]) == 0
    return dict(json.loads(path.read_text()))


def test_a_closed_loop(server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # A server on a busy machine can take longer than half a second for its first answers.
    results = benched(server, "double", tmp_path, "--concurrency", "1,4", "--rows", "2", "--duration", "3")
    assert results["server"].startswith(server.kind)
    assert [step["concurrency"] for step in results["steps"]] == [1, 4]
    for step in results["steps"]:
        assert (step["failed"], step["errors"], step["server"]) == (0, [], None)
        assert step["answered"] > 0
        assert step["rows"] == 2 * step["answered"]
    out, err = capfd.readouterr()
    assert err == "", "load processes write to this stream, too"
    assert out.splitlines()[0].split()[-2:] == ["max", "failed"], (
        "no columns of figures that the server lacks"
    )
    assert "no figures of the server's side: the server has no ModelStatistics (UNIMPLEMENTED" in out


def test_bench_needs_files_where_no_inputs_are_named(
    server: Server, tmp_path: Path, row: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (step,) = benched(server, "undeclared", tmp_path, *TWENTY, "--input", f"x={row}")["steps"]
    assert step["failed"] == 0
    assert 9 <= step["answered"] <= 11
    capfd.readouterr()
    assert bench.main([server.address, "undeclared", *SHORT]) == 1
    err = capfd.readouterr().err
    assert "the server names none of model 'undeclared': give --input NAME=FILE.npy" in err
    assert err.count("\n") == 1


def test_bench_says_that_streams_are_others_or_none(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([server.address, "double", *SHORT, *TWENTY, "--stream"]) == 1
    out, err = capfd.readouterr()
    assert err == "tensorferry bench: no request was answered\n"
    if server.kind == "mlserver":
        assert "× UNKNOWN, the first: a message of the stream answers no request" in out
    else:
        assert "× UNIMPLEMENTED, the first: " in out


def test_describe_prints_a_command_that_works(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    assert commands.describe(["double", "--target", server.address]) == 0
    out = capfd.readouterr().out
    head = (
        "double: numpy, versions 7"
        if server.kind == "mlserver"
        else "double: unknown platform, no named versions"
    )
    assert out.splitlines()[:4] == [
        head,
        "        NAME  DATATYPE  SHAPE",
        "input   x     FP32      [-1, 3]",
        "output  y     FP32      [-1, 3]",
    ]
    (printed,) = [line for line in out.splitlines() if line.startswith("tensorferry infer ")]
    assert infer.main(shlex.split(printed)[2:]) == 0
    assert "y  FP32 [1, 3]" in capfd.readouterr().out


def test_ready_and_models(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    assert commands.ready(["--target", server.address]) == 0
    status = commands.models(["--target", server.address])
    out, err = capfd.readouterr()
    if server.kind == "mlserver":
        assert status == 0
        assert sorted(line.split()[:3] for line in out.splitlines()[1:]) == [
            ["double", "7", "READY"],
            ["undeclared", "-", "READY"],
        ]
    else:
        assert status == 1
        assert "UNIMPLEMENTED: the server does not list its models (RepositoryIndex): name one" in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("model", ["double", "undeclared"])
def test_infer(server: Server, row: str, capfd: pytest.CaptureFixture[str], model: str) -> None:
    called = [model, "--target", server.address, "--format", "json"]
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": X.tolist()}
    given = [["--input", f"x={row}"], ["--json", json.dumps({"inputs": [tensor]})]]
    given += [["--input", "x=[[1, 2.5, -3]]"]] if model == "double" else []
    for arguments in given:
        assert infer.main([*called, *arguments]) == 0
        (y,) = json.loads(capfd.readouterr().out)["outputs"]
        assert (y["name"], y["datatype"], y["shape"], y["data"]) == ("y", "FP32", [1, 3], [2, 5, -6])


def test_the_client(server: Server) -> None:
    with InferenceClient(server.address) as client:
        assert client.server_metadata().name.startswith(server.kind)
        properties = client.metadata("double").properties
        assert properties == ({"content_type": "np"} if server.kind == "mlserver" else {})
        assert client.metadata("undeclared").inputs == ()
        for model in ("double", "undeclared"):
            for _ in range(2):
                np.testing.assert_array_equal(client.infer(model, {"x": X})["y"], 2 * X)
        with pytest.raises(NotFound):
            client.infer("nobody", {"x": X})
        with pytest.raises(InvalidInput, match="add 'x' and remove 'z'"):
            client.infer("double", {"z": X})


def test_what_the_server_lacks_is_an_error(server: Server) -> None:
    with InferenceClient(server.address) as client:
        for call in (client.statistics, client.log_settings, client.trace_settings):
            with pytest.raises(Unimplemented):
                call()
        with pytest.raises(Unimplemented):
            client.model_config("double")
        with pytest.raises(Unimplemented), client.shared_memory("double", rows=1):
            pass
        with pytest.raises(InvalidInput, match="names none"), client.shared_memory("undeclared", rows=1):
            pass
        with pytest.raises(InferenceError):
            list(client.stream("double", [{"x": X}]))
        # The client still works.
        np.testing.assert_array_equal(client.infer("double", {"x": X})["y"], 2 * X)
