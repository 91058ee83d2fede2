"""`tensorferry bench` against real servers: ours on both transports, and Triton."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.fixtures import Serve
from support.processes.server import ServerProcess, run_command

from serving.measure import Bench
from serving.processes import Cores
from serving.run import cache_folder
from serving.servers import TRITON, servers
from serving.workloads import WORKLOADS, write_models

# Seconds of a measurement. The next one is tried if a pause of the machine spoilt the one before.
_DURATIONS = (0.3, 2, 8)


def bench(*arguments: object, folder: Path) -> tuple[dict[str, Any], str]:
    """Run the command; return the contents of its file, and its output. It fails only if no request was answered."""
    path = folder / "results.json"
    done = run_command("bench", *arguments, "--json", path)
    results: dict[str, Any] = json.loads(path.read_text())
    answered = any(step["answered"] for step in results["steps"])
    assert done.returncode == (0 if answered else 1), done.stdout + done.stderr
    assert done.stderr == ("" if answered else "tensorferry bench: no request was answered\n")
    return results, done.stdout


def closed_loop(*arguments: object, folder: Path) -> tuple[dict[str, Any], str]:
    """Run closed loops of 1 and 8 requests on the digits model, until the measurement was not disturbed."""
    options = ["--concurrency", "1,8", "--warmup", 0.1, "--processes", 2]
    for duration in _DURATIONS:
        results, printed = bench(*arguments, *options, "--duration", duration, folder=folder)
        # In a closed loop the requests in flight are throughput times latency (Little's law).
        in_flight = [
            step["requests_per_second"] * (step["latency_seconds"]["mean"] or 0) for step in results["steps"]
        ]
        if in_flight == pytest.approx([1, 8], rel=0.5):
            return results, printed
    pytest.fail(f"requests in flight by their latencies: {in_flight}")


def test_closed_loops_of_calls_and_of_streams_are_compared(plain: ServerProcess, tmp_path: Path) -> None:
    results, printed = closed_loop(plain.address, "digits", folder=tmp_path)
    check_closed_loop(results)
    assert printed.splitlines()[0].split()[:4] == ["in", "flight", "requests/s", "p50"]
    unary = (tmp_path / "results.json").rename(tmp_path / "unary.json")
    results, printed = closed_loop(plain.address, "digits", "--stream", "--compare", unary, folder=tmp_path)
    check_closed_loop(results)
    assert "compared with" in printed


def check_closed_loop(results: dict[str, Any]) -> None:
    one, eight = results["steps"]
    assert [one["concurrency"], eight["concurrency"]] == [1, 8]
    assert [len(step["client"]["cores_by_process"]) for step in (one, eight)] == [1, 2]
    for step in (one, eight):
        assert step["failed"] == 0, step["errors"]
        assert 0 < step["client"]["seconds_per_call"] < step["seconds"]
        assert step["answered"] > 0
        latency, theirs = step["latency_seconds"], step["server"]
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["p99.9"] <= latency["max"]
        # The server counts the same requests, but for those that were in flight at the ends.
        assert theirs["failed"] == 0
        assert 0 < theirs["queue_seconds"] + theirs["compute_seconds"] < latency["max"]
        rows = sum(int(size) * number for size, number in theirs["batches_by_rows"].items())
        batches = sum(theirs["batches_by_rows"].values())
        assert rows / batches == pytest.approx(theirs["mean_batch_rows"])
    assert one["server"]["mean_batch_rows"] == 1


def test_an_open_loop_with_a_report(plain: ServerProcess, digits_model: Path, tmp_path: Path) -> None:
    images = digits_model.with_name("images.npy")
    options = ["--rate", "40", "--arrivals", "constant", "--duration", 0.5, "--warmup", 0.1, "--processes", 2]
    more = ["--input", f"image={images}", "--rows", 2, "--html", tmp_path / "report.html"]
    results, _ = bench(plain.address, "digits", *options, *more, folder=tmp_path)
    (step,) = results["steps"]
    assert step["rate"] == 40
    # Constant arrivals: their number in half a second is certain, but for those at the ends.
    assert 19 <= step["answered"] <= 21
    assert step["rows"] == 2 * step["answered"]
    assert step["rows_per_second"] == pytest.approx(2 * step["requests_per_second"])
    assert step["client"]["lag_p99_seconds"] >= 0
    report = (tmp_path / "report.html").read_text()
    assert '"model": "digits"' in report


def test_a_trace_from_the_servers_own_access_log(
    plain: ServerProcess, serve: Serve, digits_model: Path, tmp_path: Path
) -> None:
    server = serve(digits_model, "--access-log", 1000)
    np.save(tmp_path / "x.npy", np.zeros((4, 8, 8), np.uint8))
    load = [
        "--rate",
        30,
        "--duration",
        0.3,
        "--warmup",
        0,
        "--rows",
        2,
        "--input",
        f"image={tmp_path / 'x.npy'}",
    ]
    recorded, _ = bench(server.address, "digits", *load, folder=tmp_path)
    assert server.stop() == 0
    log = tmp_path / "log"
    log.write_text("\n".join(line.rstrip("\n") for line in server.log))
    results, printed = bench(plain.address, "digits", "--trace", log, "--processes", 2, folder=tmp_path)
    (step,) = results["steps"]
    assert (results["mode"], step["failed"]) == ("trace", 0)
    # The log also has the request with which the test began.
    assert step["answered"] == recorded["steps"][0]["answered"] + 1
    assert step["rows"] == 2 * step["arrived"], "the last request is sent at the end"
    assert printed.splitlines()[1].split()[0] == "trace"


@pytest.mark.skipif(
    not servers()[TRITON].installed(cache_folder()),
    reason="Triton is not installed: make bench-peers installs it",
)
def test_triton(tmp_path: Path) -> None:
    cache = cache_folder()
    write_models(cache)
    allowed = sorted(Cores.split().of_server())
    running = Bench(cache, tmp_path / "load", Cores(allowed[0], allowed[0], shared=True))
    workload = WORKLOADS["tiny"]
    with running.started(servers()[TRITON], workload) as (serving, _):
        options = ["--duration", 0.5, "--warmup", 0.2, "--processes", 1]
        address = f"127.0.0.1:{serving.port}"
        closed, _ = bench(address, "tiny", "--concurrency", "1,8", *options, folder=tmp_path)
        stream, _ = bench(address, "tiny", "--concurrency", 4, "--stream", *options, folder=tmp_path)
    assert closed["server"].startswith("triton")
    for step in (*closed["steps"], *stream["steps"]):
        assert (step["failed"], step["errors"]) == (0, [])
        assert step["answered"] > 0
        assert step["server"]["mean_batch_rows"] >= 1
        assert step["server"]["queue_seconds"] >= 0
