"""The command, with real load processes, against servers whose answers the tests define."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import polling
import pytest
from client.calls import Output, refusal
from client.load.measured import measured, tally
from client.scripted import Context, ScriptedServer, echo, model, serving

from tensorferry.client.cli import bench
from tensorferry.client.load.records import LoadError, Plan, Target
from tensorferry.client.load.results import StepResult
from tensorferry.client.load.run import LoadProcesses
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
    with serving(handlers) as address:
        yield address


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


Load = Callable[[Callable[[Step], StepResult]], None]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """A function that replaces the load processes by one that makes up the result of each step."""

    def replace(run: Callable[[Step], StepResult]) -> None:
        monkeypatch.setattr(bench, "LoadProcesses", lambda *_: nullcontext(SimpleNamespace(run=run)))

    return replace


def test_conditions_decide_the_exit_code(
    server: ScriptedServer, load: Load, tmp_path: Path, capsys: Output
) -> None:
    failures = {"INTERNAL": (20, "now and then")}
    load(lambda step: measured(tally(*[0.001] * 80, failures=failures), step=step))
    words = ["--target", server.target, "row", "--concurrency", "2"]
    table = tmp_path / "results.csv"
    assert bench.main([*words, "--assert", "errors<50%", "--assert", "p99<60s", "--csv", str(table)]) == 0
    head, line = table.read_text().splitlines()
    assert head.startswith("concurrency,rate,seconds,answered,failed")
    assert line.startswith("2,,1.0,80,20,")
    capsys.readouterr()
    assert bench.main([*words, "--assert", "p50<1us", "--assert", "rate>1", "--assert", "errors<1%"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "tensorferry bench: 2 in flight: p50<1us is not met: it is 1.00 ms",
        "tensorferry bench: 2 in flight: errors<1% is not met: it is 20%",
    ]
    assert bench.main(words) == 1
    expected = "2 in flight: 20 of 100 requests failed; --assert errors<1% allows some"
    assert capsys.readouterr().err == f"tensorferry bench: {expected}\n"


def test_the_largest_rate_with_a_condition(
    server: ScriptedServer, load: Load, tmp_path: Path, capsys: Output
) -> None:
    def run_step(step: Step) -> StepResult:
        """Return latencies of 5 ms up to 700 requests/s, of 50 ms above, and at most 900 answers."""
        rate = step.rate or 10_000
        return measured(tally(*[0.005 if rate <= 700 else 0.05] * round(min(rate, 900))), step=step)

    load(run_step)
    steps = run(server, tmp_path, "--find-rate", "p99<10ms")["steps"]
    tried = [step["rate"] for step in steps]
    assert tried == sorted(set(tried))
    best = max(rate for rate in tried if rate <= 700)
    assert best > 680
    assert f"largest rate with p99<10ms: {best:g} per second" in capsys.readouterr().out
    words = [server.target, "row", "--find-rate"]
    assert bench.main([*words, "p50<0us"]) == 1
    assert "no rate met p50<0us; the lowest that was tried is 0.2 per second" in capsys.readouterr().out
    assert bench.main([*words, "p50<10ms", "--assert", "rate>500"]) == 1
    assert "495 per second: rate>500 is not met: it is 495/s" in capsys.readouterr().err


def test_a_load_that_fails_loses_no_result_before_it(
    server: ScriptedServer, load: Load, tmp_path: Path, capsys: Output
) -> None:
    def run_step(step: Step) -> StepResult:
        if step.concurrency == 2:
            raise LoadError("no connection")
        return measured(tally(0.001), step=step)

    load(run_step)
    path = tmp_path / "results.json"
    assert bench.main([server.target, "row", "--concurrency", "1,2", "--json", str(path)]) == 1
    assert [step["concurrency"] for step in json.loads(path.read_text())["steps"]] == [1]
    captured = capsys.readouterr()
    assert captured.err == "tensorferry bench: no connection\n"
    assert "1 in flight" in captured.out


@pytest.mark.parametrize("words", [["--rate", "50"], ["--find-rate", "p99<10ms"]])
def test_no_answer_at_all_is_a_failure(
    server: ScriptedServer, load: Load, capsys: Output, words: list[str]
) -> None:
    load(lambda step: measured(tally(failures={"UNAVAILABLE": (9, "gone")}), step=step))
    assert bench.main([server.target, "row", *words]) == 1
    captured = capsys.readouterr()
    assert captured.err == "tensorferry bench: no request was answered\n"
    assert "9 × UNAVAILABLE, the first: gone" in captured.out
    assert "no rate met" not in captured.out, "none was tried"


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
    (["--shape", "x"], "argument --shape: expected [NAME:]DIMS, such as x:2,16, got 'x'"),
    (
        ["--shape", "x:1", "--shape", "x:2"],
        "--shape expects one for each input, got two for 'x': give it once",
    ),
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


@pytest.mark.parametrize("before", [False, True])
def test_a_load_process_that_is_killed_is_an_error(server: ScriptedServer, before: bool) -> None:
    """During a step, or before it."""
    body = pb.ModelInferRequest(model_name="row").SerializeToString()
    plan, steps = Plan(warmup=0.0, duration=1000.0), [Step(concurrency=1)]

    def kill(*_: object) -> None:
        processes._processes[0].kill()
        processes._processes[0].join()

    with LoadProcesses(plan, steps, Target(server.target), {1: [body]}, progress=kill) as processes:
        if before:
            kill()
        with pytest.raises(LoadError, match="load process 0 ended unexpectedly with status -9"):
            processes.run(steps[0])


def test_a_server_that_cannot_be_reached_by_the_load() -> None:
    target, steps = Target("127.0.0.1:1", connect_timeout=0.2), [Step(concurrency=1)]
    with (
        LoadProcesses(Plan(), steps, target, {1: [b""]}) as processes,
        pytest.raises(LoadError, match=r"no connection to 127\.0\.0\.1:1 within 0\.2 s"),
    ):
        processes.run(steps[0])
