"""Triton's perf_analyzer, unchanged, drives a real server in each of its modes and reads its
statistics.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.processes import models
from support.processes.server import ServerProcess, running
from support.wire.programs import CLIENTS, needs

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

FOLDER = CLIENTS / "perf_analyzer"
UNAVAILABLE = FOLDER / "unavailable"
pytestmark = [
    needs(FOLDER / ".done"),
    pytest.mark.skipif(UNAVAILABLE.exists(), reason=UNAVAILABLE.read_text() if UNAVAILABLE.exists() else ""),
]


@pytest.fixture(scope="module")
def server(transport: str, model_dir: Path) -> Iterator[ServerProcess]:
    echoes = models.echoes(model_dir, "FP32", "BYTES")
    options = ("--allow-shared-memory", "--http-port", "0")
    with running(*echoes, *options, transport=transport) as server:
        yield server


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[inference_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield inference_pb2_grpc.GRPCInferenceServiceStub(channel)


# Its time windows. Each is tried if the machine is too busy to answer anything in the one before.
MEASURED = ("100", "1000", "5000")
TOO_SHORT = "No valid requests recorded within time interval"


def perf_analyzer(server: ServerProcess, model: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it over three windows, in any order; the figures themselves are not checked."""
    assert (FOLDER / "perf_analyzer").exists(), "CI needs perf_analyzer: make tools"
    http = str(server.ready["http"]).removeprefix("http://")
    where = ("-u", http if "http" in arguments else server.address)
    protocol = () if "http" in arguments else ("-i", "grpc")
    always = ("-m", model, *where, *protocol, "--shape", "x:8", "--stability-percentage", "1000000")
    for milliseconds in MEASURED:
        ended = subprocess.run(
            [str(FOLDER / "perf_analyzer"), *always, "--measurement-interval", milliseconds, *arguments],
            env={**os.environ, "LD_LIBRARY_PATH": str(FOLDER / "lib")},
            capture_output=True,
            text=True,
            timeout=100,
        )
        if TOO_SHORT not in ended.stdout + ended.stderr:
            break
    return ended


def count(output: str, what: str) -> int:
    """Return the number that the report has for this."""
    found = re.search(rf"{what}: (\d+)", output)
    assert found is not None, output
    return int(found[1])


def successes(stub: inference_pb2_grpc.GRPCInferenceServiceStub, model: str) -> int:
    """Return how many requests the server has answered, without failures."""
    (model_stats,) = stub.ModelStatistics(pb.ModelStatisticsRequest(name=model), timeout=30).model_stats
    assert model_stats.inference_stats.fail.count == 0
    return int(model_stats.inference_stats.success.count)


MODES = {
    "sync": (),
    "async": ("--async",),
    "stream": ("--streaming",),
    "stream-async": ("--streaming", "--async"),
    "gzip": ("--grpc-compression-algorithm", "gzip"),
    "parameter": ("--request-parameter", "user:1:int"),
    "http": ("-i", "http", "--async"),
    "http-json": ("-i", "http", "--input-tensor-format", "json", "--output-tensor-format", "json"),
}


@pytest.mark.parametrize(
    ("model", "mode"), [*(("echo-FP32", mode) for mode in MODES), ("echo-BYTES", "async")]
)
def test_counts_of_each_mode_are_within_the_servers(
    server: ServerProcess, stub: inference_pb2_grpc.GRPCInferenceServiceStub, model: str, mode: str
) -> None:
    before = successes(stub, model)
    ended = perf_analyzer(server, model, "--concurrency-range", "4", *MODES[mode])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # It counts requests that end within its windows; more are sent before, between and after them.
    assert 0 < count(ended.stdout, "Request count") <= successes(stub, model) - before
    assert 0 < count(ended.stdout, "Successful request count") <= successes(stub, model) - before
    assert 0 < count(ended.stdout, "Execution count") <= count(ended.stdout, "Inference count")


def test_windows_by_request_count_and_a_csv_report(
    server: ServerProcess, stub: inference_pb2_grpc.GRPCInferenceServiceStub, tmp_path: Path
) -> None:
    report = tmp_path / "report.csv"
    windows = ("--measurement-mode", "count_windows", "--measurement-request-count", "50")
    ended = perf_analyzer(
        server,
        "echo-FP32",
        *windows,
        "--concurrency-range",
        "4",
        "-b",
        "3",
        "-f",
        str(report),
        "--verbose-csv",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert count(ended.stdout, "Request count") >= 150
    assert count(ended.stdout, "Inference count") == 3 * count(ended.stdout, "Successful request count")
    (row,) = csv.DictReader(report.read_text().splitlines())
    assert row["Concurrency"] == "4"
    for column in ("Server Queue", "Server Compute Input", "Server Compute Infer", "Server Compute Output"):
        assert int(row[column]) >= 0


@pytest.mark.parametrize("mode", ["sync", "stream-async", "http"])
def test_tensors_in_shared_memory(server: ServerProcess, mode: str) -> None:
    ended = perf_analyzer(
        server, "echo-FP32", "--concurrency-range", "4", "--shared-memory", "system", *MODES[mode]
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert count(ended.stdout, "Request count") > 0
