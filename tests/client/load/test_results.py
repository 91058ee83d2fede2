"""Sums of tallies, warnings, statistics of the server, comparisons, tables and files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from client.load.measured import EIGHT, SIDE, measured, tally, with_spread

from tensorferry.client import ModelStatistics
from tensorferry.client.load import result_file, tables
from tensorferry.client.load.result_file import Document
from tensorferry.client.load.results import StepResult
from tensorferry.client.load.server_statistics import difference, totals_of
from tensorferry.client.load.steps import BadOption, Step
from tensorferry.protos import inference_pb2 as pb


def document(*results: StepResult, rows: int = 1) -> Document:
    return result_file.document({"model": "m", "rows": rows}, results)


def test_tallies_of_several_processes_are_added_up() -> None:
    result = StepResult(Step(concurrency=2))
    first = result.add(
        [
            tally(0.01, 0.02, cpu=0.2, failures={"INTERNAL": (1, "one")}),
            tally(0.03, seconds=1.01, cpu=0.4, failures={"INTERNAL": (2, "other"), "CANCELLED": (1, "c")}),
        ]
    )
    assert first is not None
    assert (first.seconds, first.answered, first.failed) == (1.01, 3, 4)
    assert first.p50_seconds == pytest.approx(0.02, rel=0.005)
    result.add([tally(0.04, seconds=0.99, cpu=0.2), tally(seconds=0.99, cpu=0.4)])
    assert result.add([tally(0.5, seconds=0.0, cpu=0.0), tally(seconds=0.0, cpu=0.0)]) is None
    assert (result.answered, result.failed, result.seconds) == (5, 4, 2.0)
    assert result.requests_per_second == 2.0
    assert result.cpu == pytest.approx((0.2, 0.4))
    assert result.waited == pytest.approx((0.075, 0.075))
    assert result.own_seconds == pytest.approx(1.2 / 9)
    assert result.latencies.most == 0.5, "latencies after the end count"
    assert len(result.intervals) == 2
    assert result.errors == {"INTERNAL": (3, "one"), "CANCELLED": (1, "c")}


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
    result = StepResult(EIGHT)
    others = [tally(cpu=used, waited=wait) for used, wait in zip(cpu[1:], waited[1:], strict=True)]
    result.add([tally(*latencies, cpu=cpu[0], waited=waited[0], lags=lags), *others])
    assert len(result.warnings) == len(warnings)
    assert all(text.startswith(start) for text, start in zip(result.warnings, warnings, strict=True))


def statistics(scale: int) -> tuple[ModelStatistics, ...]:
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
    return ModelStatistics.from_message(answer)


def test_the_servers_side_is_a_difference_over_all_versions() -> None:
    side = difference(totals_of(statistics(1)), totals_of(statistics(3)))
    assert side is not None
    assert (side.answered, side.failed) == (80, 4)
    assert side.queue_seconds == pytest.approx(0.001)
    assert side.compute_seconds == pytest.approx(0.004)
    assert side.mean_batch_rows == 4.0
    assert side.batches_by_rows == {4: 40}


def test_without_statistics_or_after_a_restart_there_is_no_side() -> None:
    totals = totals_of(statistics(2))
    assert difference(None, totals) is None
    assert difference(totals, None) is None
    assert difference(totals, totals_of(statistics(1))) is None
    nothing = difference(totals, totals)
    assert nothing is not None
    assert (nothing.answered, nothing.queue_seconds, nothing.mean_batch_rows) == (0, None, None)
    assert nothing.batches_by_rows == {}


def test_a_file_keeps_all_figures(tmp_path: Path) -> None:
    contents = document(with_spread(0.01, 100, 104, 96), measured(tally(), step=Step(rate=5.0)))
    result_file.write(tmp_path / "r.json", contents)
    assert result_file.read(tmp_path / "r.json") == json.loads(json.dumps(contents))
    first, without = contents["steps"]
    assert (first["concurrency"], first["answered"], first["requests_per_second"]) == (8, 300, 100.0)
    assert first["latency_seconds"]["max"] == pytest.approx(0.012)
    assert sum(first["histogram"]["counts"].values()) == 300
    assert set(without["latency_seconds"].values()) == {None}


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1, "steps": [{}]}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(BadOption, match=r"schema|no file"):
        result_file.read(path)


def test_a_comparison_names_what_may_be_chance() -> None:
    quick, slow = with_spread(0.01, 100, 104, 96), with_spread(0.02, 98, 103, 96)
    alone = with_spread(0.01, 1, step=Step(concurrency=9))
    differences = result_file.compare(document(slow, alone), document(quick))
    assert {one.step for one in differences} == {"8 in flight"}
    found = {one.figure: one for one in differences}
    rate, median = found["requests per second"], found["p50"]
    assert (rate.other, rate.this) == (100, 99)
    assert rate.change == pytest.approx(-0.01)
    assert rate.within_spread is True
    assert median.change == pytest.approx(1.0, rel=0.02)
    assert median.within_spread is False
    assert found["p95"].within_spread is None
    assert found["batch"].change == 0
    assert "failed" not in found, "both are 0"
    lines = tables.comparison_table([rate, median, found["batch"]], "o.json")
    assert [re.sub(" +", " ", line) for line in lines] == [
        "compared with o.json:",
        "load figure other this change",
        "8 in flight requests per second 100 99 -1.0% within the spread of the intervals",
        "8 in flight p50 11.0 ms 21.9 ms +98.7%",
        "8 in flight batch 4.5 4.5 +0.0%",
    ]
    assert tables.comparison_table([], "o.json") == ["nothing to compare: o.json has none of these loads"]


def test_the_table() -> None:
    many = measured(*[tally(*[0.0001234] * 2000)] * 2, step=Step(concurrency=1024))
    lines = tables.table(document(with_spread(0.01, 100, 104, 96), many))
    assert [re.sub(" +", " ", line).strip() for line in lines] == [
        "in flight requests/s p50 p90 p95 p99 p99.9 max failed queue compute batch",
        "8 100 11.0 ms 11.9 ms 11.9 ms 11.9 ms 12.0 ms 12.0 ms 0 1.00 ms 2.00 ms 4.5",
        "1024 2,000 123 µs 123 µs 123 µs 123 µs 123 µs 123 µs 0 - - -",
    ]
    assert len({len(line) for line in lines}) == 1
    failed = measured(tally(failures={"INTERNAL": (3, "first")}), step=Step(rate=2.5))
    head, line = tables.table(document(failed, rows=4))
    assert re.sub(" +", " ", head).strip() == "rate requests/s rows/s p50 p90 p95 p99 p99.9 max failed"
    assert re.sub(" +", " ", line).strip() == "2.5 0 0 - - - - - - 3"


def test_errors_cannot_send_commands_to_the_terminal() -> None:
    result = measured(tally(failures={"INTERNAL": (1200, "a\n\x1b[2Jb" + "x" * 500)}, cpu=0.99))
    error, warning = tables.errors_and_warnings(document(result))
    assert error.startswith(r"8 in flight: 1,200 × INTERNAL, the first: a \x1b[2Jbxxx")
    assert error.endswith("x...")
    assert warning.startswith("WARNING (8 in flight): the client is the limit")
    lines = tables.errors_and_warnings(document(result, replace(result, step=Step(rate=2.0))))
    assert len(lines) == 3
    assert lines[2].startswith(
        "WARNING (8 in flight, 2 per second), at 2 per second: the client is the limit"
    )


def test_times_have_three_digits_and_a_unit() -> None:
    times = (None, 0.0, 9.99e-6, 0.00099949, 0.0009999, 1.5, 123.4)
    texts = ["-", "0 µs", "9.99 µs", "999 µs", "1.00 ms", "1.50 s", "123 s"]
    assert [tables.seconds_text(seconds) for seconds in times] == texts


def test_texts_of_a_server_cannot_end_the_script_of_the_report(tmp_path: Path) -> None:
    contents = document(measured(tally(0.01), server=SIDE)) | {"model": "</script><script>alert(1)</script>"}
    result_file.write_report(tmp_path / "report.html", contents, contents, "o.json")
    made = (tmp_path / "report.html").read_text()
    assert "</script><script>alert" not in made
    assert made.count("</script>") == 2
    data = made.partition('type="application/json">')[2].partition("</script>")[0]
    assert json.loads(data)["results"] == json.loads(json.dumps(contents))
    assert "http://www.w3.org" in made
    assert "https://" not in made
