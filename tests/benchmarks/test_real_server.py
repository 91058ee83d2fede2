"""Pure parts of the benchmarks with a real server, and one short run of the whole."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from closed_server import LoopFigures, explained
from load_generator import (
    BY_CLIENT,
    BY_SERVER,
    LATE,
    ON_TIME,
    PROPER,
    PUSHBACK,
    REFUSED,
    Answer,
    ClosedRun,
    channels,
    closed_loop,
    fate_of,
    percentile,
    poisson,
    summarize,
)
from overload import EXAMPLES, Capacity, Sample, Target, line
from real_server import build_mlp, examples, request_bytes, run_directly, serving

from tensorferry.protos import inference_pb2 as pb


@pytest.mark.parametrize(
    ("code", "details", "metadata", "fate"),
    [
        ("RESOURCE_EXHAUSTED", "dropped under overload", {PUSHBACK: "5"}, REFUSED),
        ("RESOURCE_EXHAUSTED", "dropped under overload", {}, "refused without pushback"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", {}, BY_CLIENT),
        ("DEADLINE_EXCEEDED", "the deadline could not be met", {}, BY_SERVER),
        ("UNAVAILABLE", "", {}, "UNAVAILABLE"),
    ],
)
def test_a_status_has_one_name(code: str, details: str, metadata: dict[str, str], fate: str) -> None:
    assert fate_of(grpc.StatusCode[code], details, metadata) == fate


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([3, 1, 2, 4], percent) for percent in (0, 25, 50, 99, 100)] == [1, 1, 2, 4, 4]
    assert percentile([], 50) != percentile([], 50)


def test_arrivals_are_the_same_for_the_same_seed() -> None:
    times = poisson(100, 10, 1)
    assert times == poisson(100, 10, 1) != poisson(100, 10, 2)
    assert times == sorted(times)
    assert times[-1] < 10
    assert len(times) == pytest.approx(1000, rel=0.1)


def test_a_summary_counts_from_the_intended_time_and_without_the_lead_in() -> None:
    answers = [
        Answer(10.0, 10.0, 10.5, ON_TIME),  # in the lead-in
        Answer(10.8, 10.8, 11.1, ON_TIME),  # sent in it
        Answer(11.0, 11.1, 11.2, ON_TIME),
        Answer(11.5, 11.5, 12.5, LATE),
        Answer(12.0, 12.0, 12.0, REFUSED),
        Answer(12.5, 12.5, 12.6, BY_SERVER),
        Answer(12.9, 12.9, 13.1, ON_TIME),  # answered after the end
        Answer(13.0, 13.0, 13.1, ON_TIME),  # after the end
    ]
    got = summarize(answers, 1.0, 3.0)
    assert (got.offered, got.answered, got.on_time) == (2.5, 1.5, 1.0)
    assert got.shares == pytest.approx({ON_TIME: 0.4, LATE: 0.2, REFUSED: 0.2, BY_SERVER: 0.2})
    assert (got.p50, got.p99) == pytest.approx((0.2, 1.0))
    assert got.lag_p99 == pytest.approx(0.1)


def test_a_server_that_had_less_of_its_core_is_not_blamed_for_it() -> None:
    summary = summarize([Answer(0.0, 0.0, 0.1, ON_TIME)], 0.0, 1.0)
    sample = Sample(1.5, Capacity(2.0, 1.0), summary, of_core=0.5)
    assert (sample.ratio, sample.ratio_per_core) == (0.5, 1.0)
    assert "0.500" in line([sample], 0.1)


def test_the_ideal_is_one_batch_of_all_without_waiting() -> None:
    ride = LoopFigures(rate=100.0, latency=0.05, queue=0.02, compute=0.02, rows=4.0, load_cpu_share=0.1)
    assert ride.rest == pytest.approx(0.01)
    assert ride.of_ideal(0.02) == pytest.approx(0.6)


def test_explained_times_are_averaged_over_requests_and_rows_over_batches() -> None:
    def response(batch: int, rows: int, queue_us: int) -> bytes:
        message = pb.ModelInferResponse()
        for name, value in (
            ("batch_number", batch),
            ("batch_rows", rows),
            ("queue_us", queue_us),
            ("compute_us", 1000),
        ):
            message.parameters[name].int64_param = value
        return message.SerializeToString()

    run = ClosedRun(
        3, 1.0, 0.1, [(0, response(1, 2, 100)), (1, response(1, 2, 400)), (2, response(2, 1, 100))]
    )
    got = explained(run)
    assert (got.rate, got.latency, got.rows) == (3.0, 1.0, 1.5)
    assert (got.queue, got.compute) == pytest.approx((200e-6, 1e-3))


async def test_a_real_server_in_both_loops(tmp_path: Path) -> None:
    model = tmp_path / "mlp.onnx"
    build_mlp(model, layers=2, width=16, positions=2)
    rows = examples(EXAMPLES, positions=2)
    with serving(model, None) as server:
        async with channels(server.address, 2) as infers:
            requests = [request_bytes(row[None], explain=True) for row in rows]
            target = Target(server, infers, requests, run_directly(model, rows))
            capacity = await target.capacity(0.5)
            assert capacity.rate > 0
            sample = await target.offer(0.2, Capacity(500.0, 1.0), 0.1, deadline=20.0, seed=1)
            assert set(sample.summary.shares) <= set(PROPER)
            ride = explained(await closed_loop(infers, requests, 2, 0.5, lead_in=0.0))
            assert 1 <= ride.rows <= 2
