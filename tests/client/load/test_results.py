"""Sums of reports, warnings, statistics, comparisons, tables and files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tensorferry.client.load import result_file, tables
from tensorferry.client.load.comparison import compare
from tensorferry.client.load.histogram import Histogram
from tensorferry.client.load.records import Plan, Tally
from tensorferry.client.load.report import page
from tensorferry.client.load.result_file import BadResults
from tensorferry.client.load.results import StepResult, StepTotals
from tensorferry.client.load.run import parts_of
from tensorferry.client.load.server_statistics import ServerSide, ServerTotals, difference
from tensorferry.client.load.steps import Arrival, Step
from tensorferry.protos import inference_pb2 as pb


def histogram(*seconds: float) -> Histogram:
    made = Histogram()
    made.add(seconds)
    return made


def tally(
    seconds: float,
    *latencies: float,
    cpu: float = 0.1,
    waited: float = 0.05,
    failures: Mapping[str, tuple[int, str]] | None = None,
    lags: tuple[float, ...] = (),
) -> Tally:
    made = histogram(*latencies)
    return Tally(seconds, made, len(latencies), histogram(*lags), failures or {}, cpu, waited)


EIGHT = Step(concurrency=8)
SIDE = ServerSide(10, 1, 0.001, 0.002, 4.5, {4: 1, 5: 1})


def result(
    rates: tuple[int, ...] = (100, 104, 96),
    latency: float = 0.01,
    step: Step = EIGHT,
    server: ServerSide | None = SIDE,
    failures: int = 0,
) -> StepResult:
    totals = StepTotals(step)
    for number, rate in enumerate(rates):
        some = [latency * (1 + number / 10)] * rate
        totals.add([tally(1.0, *some, failures={"INTERNAL": (failures, "first")} if failures else {})])
    return totals.result(server)


def test_reports_of_several_processes_are_added_up() -> None:
    totals = StepTotals(Step(concurrency=2))
    first = totals.add(
        [
            tally(1.0, 0.01, 0.02, cpu=0.2, failures={"INTERNAL": (1, "one")}),
            tally(1.01, 0.03, cpu=0.4, failures={"INTERNAL": (2, "other"), "CANCELLED": (1, "c")}),
        ]
    )
    assert first is not None
    assert (first.seconds, first.answered, first.failed) == (1.01, 3, 4)
    assert first.p50_seconds == pytest.approx(0.02, rel=0.005)
    totals.add([tally(0.99, 0.04, cpu=0.2), tally(0.99, cpu=0.4)])
    assert totals.add([tally(0.0, 0.5, cpu=0.0), tally(0.0, cpu=0.0)]) is None
    done = totals.result(None)
    assert (done.answered, done.failed, done.seconds) == (5, 4, 2.0)
    assert done.requests_per_second == 2.5
    assert done.cpu == pytest.approx((0.2, 0.4))
    assert done.waited == pytest.approx((0.075, 0.075))
    assert done.latencies.most == 0.5, "answers after the end count"
    assert len(done.intervals) == 2
    assert [(error.code, error.count, error.message) for error in done.errors] == [
        ("INTERNAL", 3, "one"),
        ("CANCELLED", 1, "c"),
    ]


BUSY = "the client is the limit: a load process used 97% of a core"
WITHOUT_CORE = "the client is the limit: a load process used 40% of a core and waited 50% of the time for one"
LATE = "the client is late: 1 % of the requests were sent 4.0 ms"
OWN = (
    "the client's own work is in the latencies: about 0.14 ms of each call, "
    "so those below 1.4 ms are more than a tenth too high"
)


@pytest.mark.parametrize(
    ("cpu", "waited", "lags", "latencies", "warnings"),
    [
        ((0.5, 0.97), (0.0, 0.9), (), [0.005] * 5000, [BUSY]),
        ((0.5, 0.4), (0.1, 0.5), (), [0.005] * 5000, [WITHOUT_CORE]),
        ((0.1,), (0.0,), (*[0.0001] * 90, *[0.004] * 10), [0.005] * 1000, [LATE]),
        ((0.42,), (0.0,), (), [*[0.00037] * 2000, *[0.1] * 1000], [OWN]),
        # The client has time, or the lag or its work is small beside the latency, or there are no calls.
        ((0.5, 0.6), (0.3, 0.2), (0.0002,), [0.005] * 5000, []),
        ((0.1,), (0.0,), (0.004,), [0.1] * 1000, []),
        ((0.42,), (0.0,), (), [0.0015] * 3000, []),
        ((0.42,), (0.0,), (), [], []),
    ],
)
def test_warnings_that_the_client_is_the_limit(
    cpu: tuple[float, ...],
    waited: tuple[float, ...],
    lags: tuple[float, ...],
    latencies: list[float],
    warnings: list[str],
) -> None:
    found = replace(
        result(), seconds=1.0, cpu=cpu, waited=waited, lags=histogram(*lags), latencies=histogram(*latencies)
    ).warnings
    assert len(found) == len(warnings)
    assert all(text.startswith(start) for text, start in zip(found, warnings, strict=True))


def test_the_clients_work_is_shared_by_all_calls() -> None:
    totals = StepTotals(Step(concurrency=2))
    failures = {"INTERNAL": (5, "first")}
    # 0.03 s and 0.05 s for 195 answers and 5 failures.
    totals.add([tally(2.0, *[0.001] * 95, cpu=0.03, failures=failures), tally(2.0, *[0.001] * 100, cpu=0.05)])
    done = totals.result(None)
    assert done.own_seconds == pytest.approx(0.0004)
    assert done.warnings[0].startswith(
        "the client's own work is in the latencies: about 0.40 ms of each call"
    )
    contents = result_file.document({}, [done, replace(done, latencies=Histogram(), errors=())])
    assert [step["client"]["seconds_per_call"] for step in contents["steps"]] == [pytest.approx(0.0004), None]
    _, line = tables.errors_and_warnings([done])
    assert line == f"WARNING (2 in flight): {done.warnings[0]}"
    assert json.dumps(done.warnings[0]) in page(contents)


def test_parts_share_a_step() -> None:
    plan = Plan(processes=4)
    assert [part.in_flight for part in parts_of(plan, Step(concurrency=2))] == [1, 1]
    assert [part.in_flight for part in parts_of(plan, Step(concurrency=262))] == [66, 66, 65, 65]
    assert [part.connections for part in parts_of(plan, Step(concurrency=260))] == [2, 2, 2, 2]
    assert [part.connections for part in parts_of(plan, Step(concurrency=256))] == [1, 1, 1, 1]
    assert {part.connections for part in parts_of(Plan(connections=3), Step(concurrency=1))} == {3}
    open_parts = parts_of(plan, Step(rate=10.0))
    assert [(part.part, part.parts, part.in_flight) for part in open_parts] == [
        (number, 4, 0) for number in range(4)
    ]
    trace = (Arrival(0.0, 1), Arrival(1.0, 1), Arrival(2.0, 1))
    sent = [list(part.arrivals()) for part in parts_of(Plan(processes=2, trace=trace), Step())]
    assert sent == [[trace[0], trace[2]], [trace[1]]]


def statistics(scale: int) -> pb.ModelStatisticsResponse:
    answer = pb.ModelStatisticsResponse()
    for version in ("1", "2"):
        one = answer.model_stats.add(
            name="m", version=version, inference_count=40 * scale, execution_count=10 * scale
        )
        stats = one.inference_stats
        stats.success.count, stats.fail.count = 20 * scale, scale
        stats.queue.count, stats.queue.ns = 20 * scale, 20_000_000 * scale
        stats.compute_infer.count, stats.compute_infer.ns = 20 * scale, 60_000_000 * scale
        stats.compute_input.ns = stats.compute_output.ns = 10_000_000 * scale
        batch = one.batch_stats.add(batch_size=4)
        batch.compute_infer.count = 10 * scale
    return answer


def test_the_servers_side_is_a_difference_over_all_versions() -> None:
    side = difference(ServerTotals.of(statistics(1)), ServerTotals.of(statistics(3)))
    assert side is not None
    assert (side.answered, side.failed) == (80, 4)
    assert side.queue_seconds == pytest.approx(0.001)
    assert side.compute_seconds == pytest.approx(0.004)
    assert side.mean_batch_rows == 4.0
    assert side.batches_by_rows == {4: 40}


def test_without_statistics_or_after_a_restart_there_is_no_side() -> None:
    totals = ServerTotals.of(statistics(2))
    assert difference(None, totals) is None
    assert difference(totals, None) is None
    assert difference(totals, ServerTotals.of(statistics(1))) is None
    nothing = difference(totals, totals)
    assert nothing is not None
    assert (nothing.answered, nothing.queue_seconds, nothing.mean_batch_rows) == (0, None, None)
    assert nothing.batches_by_rows == {}


def test_a_file_keeps_all_figures(tmp_path: Path) -> None:
    steps = [result(failures=2), result((), step=Step(rate=5.0), server=None)]
    contents = result_file.document({"model": "m"}, steps)
    result_file.write(tmp_path / "r.json", contents)
    again = result_file.steps_of(result_file.read(tmp_path / "r.json"))
    assert result_file.document({"model": "m"}, again) == contents
    first = contents["steps"][0]
    assert (first["concurrency"], first["answered"], first["failed"]) == (8, 300, 6)
    assert first["requests_per_second"] == 100.0
    assert first["latency_seconds"]["max"] == pytest.approx(0.012)
    assert contents["steps"][1]["latency_seconds"] == dict.fromkeys(
        ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
    )


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1, "steps": [{}]}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(BadResults, match=r"schema|no file"):
        result_file.read(path)


def test_a_comparison_names_what_may_be_chance() -> None:
    quick, slow = result((100, 104, 96), 0.01), result((98, 103, 96), 0.02)
    found = {one.figure: one for one in compare([slow], [quick])}
    rate, median = found["requests per second"], found["p50"]
    assert (rate.other, rate.this) == (100, 99)
    assert rate.change == pytest.approx(-0.01)
    assert rate.within_spread is True
    assert median.change == pytest.approx(1.0, rel=0.02)
    assert median.within_spread is False
    assert found["p95"].within_spread is None
    assert found["batch"].change == 0
    assert "failed" not in found, "both are 0"


def test_only_loads_of_both_are_compared() -> None:
    assert compare([result()], [result(step=Step(concurrency=9))]) == []
    assert tables.comparison_table([], "o.json") == ["nothing to compare: o.json has none of these loads"]


def test_the_table() -> None:
    lines = tables.table([result(), result((2000, 2000), 0.0001234, Step(concurrency=1024), None)], 1)
    assert [re.sub(" +", " ", line).strip() for line in lines] == [
        "in flight requests/s p50 p90 p95 p99 p99.9 max failed queue compute batch",
        "8 100 11.0 ms 11.9 ms 11.9 ms 11.9 ms 12.0 ms 12.0 ms 0 1.00 ms 2.00 ms 4.5",
        "1024 2,000 123 µs 136 µs 136 µs 136 µs 136 µs 136 µs 0 - - -",
    ]
    assert len({len(line) for line in lines}) == 1
    head, line = tables.table([result((0,), step=Step(rate=2.5), server=None, failures=3)], 4)
    assert re.sub(" +", " ", head).strip() == "rate requests/s rows/s p50 p90 p95 p99 p99.9 max failed"
    assert re.sub(" +", " ", line).strip() == "2.5 0 0 - - - - - - 3"


def test_errors_cannot_send_commands_to_the_terminal() -> None:
    totals = StepTotals(Step(concurrency=1))
    totals.add([tally(1.0, failures={"INTERNAL": (1200, "a\n\x1b[2Jb" + "x" * 500)}, cpu=0.99)])
    error, warning = tables.errors_and_warnings([totals.result(None)])
    assert error.startswith(r"1 in flight: 1,200 × INTERNAL, the first: a \x1b[2Jbxxx")
    assert error.endswith("x...")
    assert warning.startswith("WARNING (1 in flight): the client is the limit")
    several = [totals.result(None), replace(totals.result(None), step=Step(rate=2.0))]
    lines = tables.errors_and_warnings(several)
    assert len(lines) == 3
    assert lines[2].startswith(
        "WARNING (1 in flight, 2 per second), at 2 per second: the client is the limit"
    )


def test_times_have_three_digits_and_a_unit() -> None:
    times = (None, 0.0, 9.99e-6, 0.00099949, 0.0009999, 1.5, 123.4)
    texts = ["-", "0 µs", "9.99 µs", "999 µs", "1.00 ms", "1.50 s", "123 s"]
    assert [tables.seconds_text(seconds) for seconds in times] == texts


def test_texts_of_a_server_cannot_end_the_script_of_the_report() -> None:
    contents = result_file.document({"model": "</script><script>alert(1)</script>"}, [result()])
    made = page(contents, contents, "o.json")
    assert "</script><script>alert" not in made
    assert made.count("</script>") == 2
    data = made.partition('type="application/json">')[2].partition("</script>")[0]
    assert json.loads(data)["results"] == json.loads(json.dumps(contents))
    assert "http://www.w3.org" in made
    assert "https://" not in made
