"""Pure parts of `make gpu-bench`: sizes, searches, LoadGen's summary, accounting, predictions."""

from __future__ import annotations

import math
import subprocess

import onnxruntime
import pytest

from gpu.accounting import Account, Snapshot, Stages, sizes_between
from gpu.cores import Layout
from gpu.loadgen import LoadError, Outcome, parse_summary
from gpu.loop import Timed, best_rate, chosen_size, fastest_size
from gpu.needs import MODULES, missing, versions
from gpu.patched_server import eager
from gpu.peak import PeakSearch, stepped_down
from gpu.predict import fitted, predict
from gpu.run import _device_name
from gpu.servers import DEFAULT, EAGER, THROUGHPUT, Variant, why_not
from tensorferry.batcher.policy.close_rule import Wait
from tensorferry.batcher.queue.request_queue import RequestQueue
from tensorferry.batcher.request import BatchAssignment, Request
from tensorferry.batcher.request import Outcome as Result
from tensorferry.batcher.settings import BatcherSettings
from tensorferry.batcher.testing import VirtualClock

SERVER_SUMMARY = """================================================
MLPerf Results Summary
================================================
SUT name : PyFastSUT
Scenario : Server
Mode     : PerformanceOnly
Completed samples per second    : 990.15
Result is : VALID
  Performance constraints satisfied : Yes

================================================
Additional Stats
================================================
Scheduled samples per second : 990.49
Mean latency (ns)               : 1336739
50.00 percentile latency (ns)   : 1079305
99.00 percentile latency (ns)   : 4172981
99.90 percentile latency (ns)   : 6512829
"""
OFFLINE_SUMMARY = SERVER_SUMMARY.replace(
    "Completed samples per second    : 990.15", "Samples per second: 5.82e+05"
).replace("VALID", "INVALID")


def timed(rows: int, milliseconds: float, copies: bool = False) -> Timed:
    return Timed(rows, copies, rows / milliseconds * 1e3, milliseconds / 1e3)


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ([5], ((5,), 5, (5,))),
        ([0, 1], ((0,), 1, (1,))),
        ([0, 1, 2], ((0,), 2, (1,))),
        (list(range(16)), ((0, 1, 2, 3), 15, tuple(range(4, 15)))),
    ],
)
def test_a_quarter_of_the_cores_serves_and_the_rest_sends(
    cores: list[int], expected: tuple[tuple[int, ...], int, tuple[int, ...]]
) -> None:
    layout = Layout.of(cores)
    assert (layout.server, layout.loadgen, layout.senders) == expected


def test_the_layout_says_that_load_and_server_share_a_core() -> None:
    assert "mistrust" in str(Layout.of([0]))
    assert str(Layout.of([0, 1])) == "1 of the cores for the server, 1 for the load, which is LoadGen's too"
    assert str(Layout.of(list(range(16)))) == "4 of the cores for the server, 11 for the load, 1 for LoadGen"


def test_the_largest_batch_that_fits_the_bound_and_is_as_fast_as_any_that_does() -> None:
    times = [timed(1, 1), timed(8, 4), timed(16, 5), timed(32, 5.5), timed(64, 10)]
    assert best_rate(times) == pytest.approx(6400)
    assert fastest_size(times) == 64
    assert chosen_size(times, 0.015) == 32
    assert chosen_size(times, 0.130) == 64
    assert chosen_size(times, 0.010) == 8
    # A larger batch that is slower by more than 15 % is not worth its latency.
    assert chosen_size([timed(1, 1), timed(2, 1), timed(4, 2.5)], 1.0) == 2
    assert chosen_size([timed(1, 1), timed(2, 1), timed(4, 2.2)], 1.0) == 4
    # Copies count: a batch that fits only without them does not fit.
    assert chosen_size([timed(1, 1), timed(8, 4), timed(8, 9, copies=True)], 0.015) == 1
    # Nothing fits: the smallest size.
    assert chosen_size(times, 0.0001) == 1


@pytest.mark.parametrize("limit", [0.5, 7.0, 86.0, 97.0, 200.0])
def test_the_search_ends_near_the_highest_rate_that_meets_the_bound(limit: float) -> None:
    search = PeakSearch(100.0)
    for _ in range(12):
        search.record(search.rate <= limit)
    assert search.best == pytest.approx(min(limit, 108.0), abs=0.1)
    assert len(search.tried) == 12
    assert search.tried[0][0] == 85.0


def test_a_search_that_never_met_the_bound_found_nothing() -> None:
    search = PeakSearch(100.0)
    for _ in range(3):
        search.record(False)
    assert search.best == 0.0
    assert stepped_down(100.0) == pytest.approx(95.0)


def test_loadgens_summary_of_both_scenarios() -> None:
    server, offline = parse_summary(SERVER_SUMMARY), parse_summary(OFFLINE_SUMMARY)
    assert (server.rate, server.valid) == (990.15, True)
    assert (server.mean, server.p50, server.p99) == pytest.approx((1.336739e-3, 1.079305e-3, 4.172981e-3))
    assert (offline.rate, offline.valid) == (582000.0, False)


@pytest.mark.parametrize("name", ["Completed samples per second", "Result is", "99.00 percentile latency"])
def test_a_summary_without_a_figure_is_an_error(name: str) -> None:
    with pytest.raises(LoadError, match="LoadGen's summary has no"):
        parse_summary(SERVER_SUMMARY.replace(name, "Something else"))


@pytest.mark.parametrize(("p99", "errors", "met"), [(0.13, 0, True), (0.131, 0, False), (0.01, 1, False)])
def test_a_run_with_errors_meets_no_bound(p99: float, errors: int, met: bool) -> None:
    outcome = Outcome("Server", 1.0, 1.0, 0.0, 0.0, p99, True, errors, 0.0, 0.0, 1.0)
    assert outcome.met(0.130) is met


def snapshot(
    at: float, stages: dict[int, Stages], answered: int, cpu: float, threads: dict[int, float]
) -> Snapshot:
    return Snapshot(at, stages, answered, answered * 0.02, cpu, threads)


def test_an_account_is_the_difference_of_two_snapshots() -> None:
    first = snapshot(10.0, {1: Stages(5, 1.0, 1.0, 1.0)}, 5, 1.0, {7: 0.5})
    second = snapshot(
        20.0, {1: Stages(5, 1.0, 1.0, 1.0), 4: Stages(100, 0.1, 6.0, 0.3)}, 405, 9.0, {7: 6.5, 8: 2.0}
    )
    got = Account.between(first, second)
    assert (got.rows, got.busy, got.run) == pytest.approx((4.0, 0.6, 0.06))
    assert (got.before, got.after, got.cpu, got.cores) == pytest.approx((0.001, 0.003, 0.02, 0.8))
    assert got.threads == pytest.approx((0.6, 0.2))
    assert got.inside == pytest.approx(0.02)
    assert set(sizes_between(first, second)) == {4}
    with pytest.raises(ValueError, match="answered nothing"):
        Account.between(second, second)


def test_a_weighted_line_neither_falls_nor_starts_below_zero() -> None:
    exact = fitted({1: (3.0, 1), 2: (5.0, 10), 4: (9.0, 1)})
    assert (exact.fixed, exact.per_row) == pytest.approx((1.0, 2.0))
    falling = fitted({1: (3.0, 1), 2: (1.0, 1)})
    assert falling.fixed == pytest.approx(2.0)
    assert falling.per_row == pytest.approx(0.0, abs=1e-8)
    through_nothing = fitted({2: (1.0, 1), 4: (4.0, 1)})
    assert (through_nothing.fixed, through_nothing.per_row) == pytest.approx((0.0, 2.5 / 3))
    assert fitted({8: (4.0, 3)}).fixed == pytest.approx(4.0)


def test_the_simulation_says_that_eager_closing_costs_where_two_batches_are_in_flight() -> None:
    sizes = {rows: Stages(10, 10 * 1e-3, 10 * (3e-3 + rows * 1e-4), 10 * 2e-4) for rows in (1, 16, 64)}
    got = predict(sizes, 64, 0.025, 0.001, pipelined=True, count=1500, searches=7)
    assert got is not None
    assert 0 < got.eager < got.just_in_time < got.offline == pytest.approx(64 / (3e-3 + 64e-4))
    one = predict(sizes, 64, 0.025, 0.001, pipelined=False, count=500, searches=5)
    assert one is not None
    assert one.just_in_time == pytest.approx(one.eager, rel=0.1)
    assert predict(sizes, 64, 0.025, 0.025, pipelined=True, count=10, searches=1) is None


def test_a_variant_is_left_out_for_a_reason() -> None:
    flags = "--port --max-batch-size"
    assert why_not(DEFAULT, "cpu", flags, same_size=True) == ""
    assert why_not(EAGER, "cuda:0", flags, same_size=True) == ""
    assert "fastest already" in why_not(THROUGHPUT, "cuda:0", flags, same_size=True)
    assert why_not(THROUGHPUT, "cuda:0", flags, same_size=False) == ""
    graphs = Variant("graphs", "", flags=("--no-such-flag", "true"), for_gpu=True)
    assert "on a GPU only" in why_not(graphs, "cpu", flags, same_size=True)
    assert why_not(graphs, "cuda:0", flags, same_size=True) == "this server has no --no-such-flag"
    there = Variant("there", "", needs="math:inf")
    gone = Variant("gone", "", needs="math:no_such_name")
    assert why_not(there, "cpu", flags, same_size=True) == ""
    assert why_not(gone, "cpu", flags, same_size=True) == "this server has no math:no_such_name"


def _ignore(result: Result) -> None:
    """Ignore the outcome."""


def _second_batch() -> BatchAssignment | Wait | None:
    """Return the batch of a pipelined device's other worker while the first batch runs."""
    clock = VirtualClock()
    queue = RequestQueue(
        BatcherSettings(8, 0.0, max_queue_size=100, max_queue_bytes=1 << 20, pipelined=True), clock
    )
    queue.add_warmup_sample(1, 1.0)
    queue.put((Request((), _ignore, names=None, rows=1, nbytes=0),))
    assert isinstance(queue.poll(), BatchAssignment)
    queue.put((Request((), _ignore, names=None, rows=1, nbytes=0),))
    return queue.poll()


def test_the_eager_server_closes_a_second_batch_at_once_and_the_shipped_one_just_in_time() -> None:
    shipped = _second_batch()
    assert isinstance(shipped, Wait)
    assert 0 < shipped.until < math.inf
    with eager():
        assert isinstance(_second_batch(), BatchAssignment)
    assert isinstance(_second_batch(), Wait)


def test_missing_modules_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "no_such_module.inside", "no-such-package")
    assert missing(["numpy", "no_such_module.inside"]) == ["no_such_module.inside (no-such-package)"]


def test_the_version_is_that_of_the_onnxruntime_that_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxruntime.capi import build_and_package_info

    assert versions()["onnxruntime"] == onnxruntime.__version__
    monkeypatch.setattr(build_and_package_info, "package_name", "onnxruntime-gpu")
    monkeypatch.setattr(build_and_package_info, "cuda_version", "13.0", raising=False)
    found = versions()
    assert found["onnxruntime-gpu"] == f"{onnxruntime.__version__} (CUDA 13.0)"
    assert "onnxruntime" not in found, "one that lies beside it, and is not used"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((0, "NVIDIA H100 80GB HBM3, 580.159.04\n"), "NVIDIA H100 80GB HBM3, 580.159.04"),
        ((6, "No devices were found\n"), "cuda:1"),
        (None, "cuda:1"),
    ],
)
def test_the_device_has_a_name_if_nvidia_smi_is_there(
    said: tuple[int, str] | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if said is None:
            raise FileNotFoundError(words[0])
        assert words[-1] == "--id=0000:3b:00.0"
        return subprocess.CompletedProcess(words, *said)

    monkeypatch.setattr(
        "tensorferry.server.runtime.devices.pci_bus_id", lambda index: ("", "0000:3b:00.0")[index]
    )
    monkeypatch.setattr(subprocess, "run", ask)
    assert _device_name("cuda:1") == expected
