"""The command, with real load processes, against servers whose answers the tests define."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import polling
import pytest
from client.calls import Output, refusal
from client.scripted import Context, ScriptedServer, echo, model

from tensorferry.client.cli import bench
from tensorferry.client.load.records import Plan, Target
from tensorferry.client.load.run import LoadError, LoadProcesses
from tensorferry.client.load.steps import Step
from tensorferry.protos import inference_pb2 as pb

SHORT = ["--duration", "0.3", "--warmup", "0.05", "--processes", "1"]


@pytest.fixture
def minimal() -> Iterator[str]:
    """The address of a server with the least of the protocol: metadata of models, and unary inference."""
    described = model("row", {"x": "FP32 -1 3"}, {"x": "FP32 -1 3"})
    handlers: dict[str, Any] = {
        "ModelMetadata": grpc.unary_unary_rpc_method_handler(
            lambda request, context: described,
            pb.ModelMetadataRequest.FromString,
            pb.ModelMetadataResponse.SerializeToString,
        ),
        "ModelInfer": grpc.unary_unary_rpc_method_handler(
            echo, pb.ModelInferRequest.FromString, pb.ModelInferResponse.SerializeToString
        ),
    }
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("load", [["--concurrency", "2,8"], ["--rate", "50"]])
def test_a_number_of_requests(minimal: str, tmp_path: Path, load: list[str]) -> None:
    """With two processes, and fewer requests than would be in flight."""
    path = tmp_path / "results.json"
    options = [*load, "--requests", "5", "--processes", "2", "--json", str(path)]
    assert bench.main([minimal, "row", *options]) == 0
    results = json.loads(path.read_text())
    assert (results["requests"], results["duration_seconds"]) == (5, None)
    assert {step["answered"] for step in results["steps"]} == {5}


def test_a_minimal_server(minimal: str, tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "results.json"
    assert (
        bench.main([minimal, "row", *SHORT, "--concurrency", "1,3", "--rows", "2", "--json", str(path)]) == 0
    )
    results = json.loads(path.read_text())
    assert (results["schema"], results["mode"], results["server"]) == (1, "closed", None)
    assert [step["concurrency"] for step in results["steps"]] == [1, 3]
    for step in results["steps"]:
        assert step["answered"] > 0
        assert (step["failed"], step["errors"], step["server"]) == (0, [], None)
        assert step["rows"] == 2 * step["answered"]
        assert step["requests_per_second"] == pytest.approx(step["answered"] / step["seconds"])
    out = capsys.readouterr()
    assert "no figures of the server's side: the server has no ModelStatistics (UNIMPLEMENTED" in out.out
    assert out.err == "", "stderr is no terminal, so there is no progress"
    # It has no streams.
    assert bench.main([minimal, "row", *SHORT, "--stream", "--concurrency", "1"]) == 1
    assert "× UNIMPLEMENTED" in capsys.readouterr().out


def run(server: ScriptedServer, folder: Path, *arguments: str, model: str = "row") -> dict[str, Any]:
    path = folder / "results.json"
    assert bench.main([server.target, model, *SHORT, *arguments, "--json", str(path)]) == 0
    return dict(json.loads(path.read_text()))


def test_streams(server: ScriptedServer, tmp_path: Path) -> None:
    results = run(server, tmp_path, "--stream", "--concurrency", "2")
    assert results["steps"][0]["answered"] > 0
    assert results["server"] == "scripted 9"
    assert "ModelInfer" not in server.servicer.calls
    assert server.servicer.calls.count("ModelStreamInfer") == 1


def test_progress_on_a_terminal_failures_with_the_first_message_and_hidden_headers(
    server: ScriptedServer, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter(range(1_000_000))

    def infer(request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        if (number := next(numbers)) % 2:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"full after {number}")
        return echo(request)

    server.servicer.infer = infer
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    words = ["--concurrency", "1", "--warmup", "0", "--header", "X-Secret=hidden", "--assert", "errors<60%"]
    results = run(server, tmp_path, *words)
    for method in ("ModelInfer", "ModelStatistics"):
        assert server.metadata_of(method)["x-secret"] == "hidden"
    assert "hidden" not in (tmp_path / "results.json").read_text()
    assert "--header X-Secret=..." in results["command"]
    (step,) = results["steps"]
    (error,) = step["errors"]
    assert (error["code"], error["message"]) == ("RESOURCE_EXHAUSTED", "full after 1")
    assert abs(step["failed"] - step["answered"]) <= 1
    told = capsys.readouterr()
    assert "× RESOURCE_EXHAUSTED, the first: full after 1" in told.out
    (progress,) = told.err.splitlines()
    assert progress.startswith("1 in flight, 1 of 1: ")
    assert "per second, p50 " in progress


def test_conditions_decide_the_exit_code(server: ScriptedServer, tmp_path: Path, capsys: Output) -> None:
    def failing() -> Callable[[pb.ModelInferRequest, Context], pb.ModelInferResponse]:
        """Return what answers four of five requests, the first ones among them."""
        numbers = itertools.count()

        def infer(request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
            if next(numbers) % 5 == 4:
                context.abort(grpc.StatusCode.INTERNAL, "now and then")
            return echo(request)

        return infer

    words = ["--target", server.target, "row", *SHORT, "--concurrency", "2"]
    table = tmp_path / "results.csv"
    server.servicer.infer = failing()
    assert bench.main([*words, "--assert", "errors<50%", "--assert", "p99<60s", "--csv", str(table)]) == 0
    head, line = table.read_text().splitlines()
    assert head.startswith("concurrency,rate,seconds,answered,failed")
    assert line.startswith("2,,")
    capsys.readouterr()
    server.servicer.infer = failing()
    assert bench.main([*words, "--assert", "p50<1us", "--assert", "rate>1"]) == 1
    assert re.fullmatch(
        r"tensorferry bench: 2 in flight: p50<1us is not met: it is .*s\n", capsys.readouterr().err
    )
    server.servicer.infer = failing()
    assert bench.main(words) == 1
    assert "requests failed; --assert errors<1% allows some" in capsys.readouterr().err


def test_the_largest_rate_with_a_condition(server: ScriptedServer, capsys: Output) -> None:
    words = [server.target, "row", *SHORT, "--processes", "1"]
    assert bench.main([*words, "--find-rate", "p99<60s"]) in (0, 1)
    found = capsys.readouterr().out
    assert "largest rate with p99<60s: " in found or "no rate met p99<60s" in found
    assert bench.main([*words, "--find-rate", "p50<0us"]) == 1
    assert "no rate met p50<0us; the lowest that was tried is" in capsys.readouterr().out


def test_a_request_that_the_server_refuses_is_one_line(server: ScriptedServer, capsys: Output) -> None:
    def infer(request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such\nshape")
        raise AssertionError

    server.servicer.infer = infer
    assert bench.main([server.target, "row", *SHORT]) == 1
    expected = f"tensorferry bench: {server.target}: INVALID_ARGUMENT: no such shape\n"
    assert capsys.readouterr().err == expected


def test_no_answer_at_all_is_a_failure(server: ScriptedServer, capsys: Output) -> None:
    first = iter([True])

    def infer(request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        if not next(first, False):
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return echo(request)

    server.servicer.infer = infer
    assert bench.main([server.target, "row", *SHORT, "--rate", "50"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "tensorferry bench: no request was answered\n"
    assert "× UNAVAILABLE, the first: gone" in captured.out


def test_a_server_without_metadata_needs_files(
    server: ScriptedServer, tmp_path: Path, capsys: Output
) -> None:
    server.servicer.failures = [grpc.StatusCode.UNIMPLEMENTED]
    np.savez(tmp_path / "inputs.npz", x=np.zeros((6, 3), np.float32))
    words = ["--input", str(tmp_path / "inputs.npz"), "--rows", "2", "--concurrency", "1"]
    results = run(server, tmp_path, *words, model="m")
    assert results["steps"][0]["answered"] > 0
    assert {tuple(request.inputs[0].shape) for request in server.servicer.requests} == {(2, 3)}
    server.servicer.failures = [grpc.StatusCode.UNIMPLEMENTED]
    assert bench.main([server.target, "m", *SHORT]) == 1
    assert "UNIMPLEMENTED: scripted failure" in capsys.readouterr().err


WRONG = [
    (["--concurrency", "0"], "argument --concurrency: expected whole numbers from 1 to 65536"),
    (["--rate", "1", "--concurrency", "1"], "argument --rate: not allowed with --concurrency"),
    (["--processes", "0"], "argument --processes: expected a whole number from 1 to 256, got '0'"),
    (["--shape", "x"], "argument --shape: expected NAME:DIMS such as image:3,224,224, got 'x'"),
    (["--shape", "x:1", "--shape", "x:2"], "argument --shape: 'x' is given more than once"),
    (["--rows", "2"], "rows expects 1, got 2"),
    (["--input", "/no/such.npz"], "argument --input: '/no/such.npz' cannot be read"),
    (["--trace", __file__], 'line 1: expected {"at": SECONDS, "rows": NUMBER}'),
    (["--compare", __file__], "is no file that tensorferry bench --json wrote"),
    (["--json", "/no/such/r.json"], "argument --json: '/no/such' is no directory"),
    (["--imput", "x"], "unknown flag --imput; did you mean --input?"),
]


def test_a_bad_argument_exits_with_2(server: ScriptedServer, capsys: Output) -> None:
    for arguments, text in WRONG:
        error = refusal(capsys, bench.main, [server.target, "row", *arguments])
        assert text in error, arguments
        assert error.startswith("tensorferry bench: ")


def test_files_without_metadata_must_have_a_datatype_of_the_protocol(
    server: ScriptedServer, tmp_path: Path, capsys: Output
) -> None:
    server.servicer.models["nameless"] = model("nameless", {}, {})
    np.save(tmp_path / "z.npy", np.zeros((2, 3), np.complex64))
    error = refusal(capsys, bench.main, [server.target, "nameless", "--input", f"z={tmp_path / 'z.npy'}"])
    assert "input 'z' expects a datatype of the protocol, got numpy dtype complex64" in error


def test_an_unknown_model_or_server_is_one_line(server: ScriptedServer, capsys: Output) -> None:
    assert bench.main([server.target, "nothing"]) == 1
    assert capsys.readouterr().err == f"tensorferry bench: {server.target}: NOT_FOUND: no model 'nothing'\n"
    assert bench.main(["127.0.0.1:1", "row"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tensorferry bench: 127.0.0.1:1: UNAVAILABLE: ")
    assert error.count("\n") == 1


def test_several_targets_are_refused(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORFERRY_TARGET", "127.0.0.1:1,127.0.0.1:2")
    assert "TENSORFERRY_TARGET names 2 servers: give one TARGET" in refusal(capsys, bench.main, ["row"])


def group_is_empty(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return True
    return False


# A shell's background jobs ignore SIGINT, and so do the processes that they start.
_BENCH = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tensorferry.server.__main__ import main
sys.exit(main())
"""


def test_ctrl_c_ends_all_processes(server: ScriptedServer) -> None:
    begun = threading.Event()
    numbers = iter(range(1_000_000))

    def infer(request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        if next(numbers) == 5:
            begun.set()
        return echo(request)

    server.servicer.infer = infer
    words = [server.target, "row", "--concurrency", "2", "--duration", "1000", "--processes", "2"]
    with subprocess.Popen(
        [sys.executable, "-c", _BENCH, "bench", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as started:
        try:
            assert begun.wait(60)
            # As a terminal does: to all processes of the group.
            os.killpg(started.pid, signal.SIGINT)
            out, error = started.communicate(timeout=60)
        except BaseException:
            os.killpg(started.pid, signal.SIGKILL)
            raise
    assert started.returncode == 130
    assert (out, error) == ("", "tensorferry bench: interrupted before the first step had ended\n")
    polling.until(lambda: group_is_empty(started.pid))


def test_a_load_process_that_is_killed_is_an_error(server: ScriptedServer) -> None:
    body = pb.ModelInferRequest(model_name="row").SerializeToString()
    target = Target(server.target)

    def kill(step: Step, number: int, interval: object) -> None:
        processes._processes[0].kill()

    with LoadProcesses(1, target, {1: [body]}) as processes:
        plan = Plan(warmup=0.0, duration=1000.0)
        with pytest.raises(LoadError, match="load process 0 ended unexpectedly with status -9"):
            processes.run(plan, Step(concurrency=1), target.timeout, progress=kill)


def test_a_server_that_cannot_be_reached_by_the_load() -> None:
    target = Target("127.0.0.1:1", connect_timeout=0.2)
    with (
        LoadProcesses(1, target, {1: [b""]}) as processes,
        pytest.raises(LoadError, match=r"no connection to 127\.0\.0\.1:1 within 0\.2 s"),
    ):
        processes.run(Plan(), Step(concurrency=1), 1.0)
