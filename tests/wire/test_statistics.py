"""tritonclient reads the statistics of a real server: exact, and as soon as the answer arrives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton
from support.processes.server import ServerProcess, running
from support.wire.inputs import probe
from tritonclient.utils import InferenceServerException

from tensorferry.protos import inference_pb2 as pb

MOST = 4


# The models of the tests, which are the same: each has its own counters.
NAMES = ("counted", "listed", "unused")


@pytest.fixture(scope="module")
def server(transport: str, probe_model: Path) -> Iterator[ServerProcess]:
    models = [f"{name}={probe_model}" for name in NAMES]
    with running(*models, "--max-batch-size", str(MOST), transport=transport) as server:
        yield server


def statistics(client: triton.InferenceServerClient, model: str, version: str = "") -> Any:
    (one,) = client.get_inference_statistics(model, version).model_stats
    return one


def adds_up(one: pb.ModelStatistics) -> None:
    """Check the sums that perf_analyzer and others rely on."""
    stats = one.inference_stats
    stages = (stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output)
    assert {stage.count for stage in stages} == {stats.success.count}
    assert sum(stage.ns for stage in stages) == stats.success.ns
    executions = 0
    for batch in one.batch_stats:
        executions += batch.compute_infer.count
        assert batch.compute_input.count == batch.compute_infer.count == batch.compute_output.count > 0
        assert batch.compute_infer.ns > 0
    assert executions == one.execution_count
    assert sum(b.batch_size * b.compute_infer.count for b in one.batch_stats) == one.inference_count
    assert (stats.cache_hit.count, stats.cache_miss.count) == (0, 0)


def test_counters_include_each_answer_once_it_arrives(client: triton.InferenceServerClient) -> None:
    """After each answer and each error the counters include it, without a wait."""
    assert statistics(client, "counted").inference_stats.success.count == 0
    began = int(time.time() * 1e3)
    answered = rows = failed = 0
    for number in range(30):
        if number % 5 == 4:
            with pytest.raises(InferenceServerException):
                client.infer("counted", probe(index=99))
            failed += 1
        else:
            count = 1 + number % 7
            client.infer("counted", probe(rows=count))
            answered, rows = answered + 1, rows + count
        one = statistics(client, "counted")
        assert one.inference_stats.success.count == answered
        assert one.inference_stats.fail.count == failed
        assert one.inference_count == rows
        adds_up(one)
    assert began <= one.last_inference <= int(time.time() * 1e3) + 1
    assert {batch.batch_size for batch in one.batch_stats} == {1, 2, 3, 4}
    assert statistics(client, "unused").inference_stats.success.count == 0
    assert statistics(client, "counted") == one, "asking changes nothing"


def test_statistics_of_all_models_of_one_and_of_an_unknown_one(client: triton.InferenceServerClient) -> None:
    client.infer("listed", probe(rows=3))
    every = client.get_inference_statistics()
    assert [(one.name, one.version) for one in every.model_stats] == [(name, "1") for name in sorted(NAMES)]
    assert statistics(client, "listed", "1") in every.model_stats
    for model, version in (("other", ""), ("listed", "2")):
        with pytest.raises(InferenceServerException) as caught:
            client.get_inference_statistics(model, version)
        assert caught.value.status() == "StatusCode.NOT_FOUND"
    assert "statistics" in client.get_server_metadata().extensions
    as_json = client.get_inference_statistics("listed", as_json=True)
    assert as_json["model_stats"][0]["inference_count"] == "3"
