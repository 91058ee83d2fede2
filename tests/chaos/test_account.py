"""The soak's evaluation finds each forbidden outcome in a ledger."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import report
from chaos.account import Account, Answer, read
from chaos.content import COLUMNS, FACTOR, OFFSET, Mark, rows_of, verdict_of
from chaos.report import Window
from chaos.watch import Sample


def account(tmp_path: Path, *lines: str, killed: bool = False) -> Account:
    ledger = tmp_path / "1.ledger"
    ledger.write_text("".join(f"{line}\n" for line in lines))
    return read([ledger], {ledger} if killed else set())


def test_a_call_that_is_answered_is_counted_with_its_time(tmp_path: Path) -> None:
    found = account(tmp_path, "S 1.1 1.000 10.0 robin NONE", "E 1.1 OK 10.5")
    assert found.right
    assert found.answers == [Answer(10.5, 0.5, "robin")]
    assert found.states == {("robin", "OK"): 1}


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        (["S 1.1 1.000 10.0 robin NONE"], "lost"),
        (["S 1.1 1.000 10.0 robin NONE", "E 1.1 OK 31.5"], "lost"),
        (["S 1.1 - 10.0 robin NONE", "E 1.1 OK 71.0"], "lost"),
        (["S 1.1 1.000 10.0 robin NONE", "E 1.1 OK 10.1", "E 1.1 OK 10.2"], "doubled"),
        (["E 1.1 OK 10.1"], "doubled"),
        (["S 1.1 1.000 10.0 robin NONE", "E 1.1 CROSSED(2.7:[[2.0,_7.0]]) 10.1"], "crossed"),
        (["S 1.1 1.000 10.0 robin NONE", "E 1.1 INTERNAL 10.1"], "unexplained"),
        (["S 1.1 1.000 10.0 robin HANG", "E 1.1 INTERNAL 10.1"], "unexplained"),
        (["S 1.1 1.000 10.0 robin NONE", "E 1.1 UNKNOWN(what) 10.1"], "unexplained"),
        (["S 1.1 1.000 10.0 stream NONE", "E 1.1 NO_ANSWER 10.1"], "unexplained"),
    ],
)
def test_forbidden_outcomes_are_found(lines: list[str], where: str, tmp_path: Path) -> None:
    found = account(tmp_path, *lines)
    assert not found.right
    wrong = {name for name in ("lost", "doubled", "crossed", "unexplained") if getattr(found, name)}
    assert wrong == {where}


def test_the_faulty_request_may_get_internal(tmp_path: Path) -> None:
    assert account(tmp_path, "S 1.1 1.000 10.0 robin RAISE", "E 1.1 INTERNAL 10.1").right


def test_a_killed_caller_leaves_calls_open(tmp_path: Path) -> None:
    found = account(tmp_path, "S 1.1 1.000 10.0 robin NONE", killed=True)
    assert found.right
    assert found.left == 1


def test_an_answer_is_right_for_its_own_request_alone() -> None:
    mine, other = rows_of(3, 17, 2), rows_of(4, 17, 2)
    assert mine.shape == (2, COLUMNS)
    assert verdict_of(FACTOR * mine + OFFSET, "3.17", mine, "3.17") == "OK"
    assert verdict_of(FACTOR * other + OFFSET, "3.17", mine, "3.17").startswith("CROSSED")
    assert verdict_of(FACTOR * mine + OFFSET, "4.17", mine, "3.17").startswith("CROSSED")
    assert verdict_of((FACTOR * mine + OFFSET)[:1], "3.17", mine, "3.17").startswith("CROSSED")
    assert verdict_of((FACTOR * mine + OFFSET)[::-1], "3.17", mine, "3.17").startswith("CROSSED")
    assert verdict_of((FACTOR * mine + OFFSET)[:0], "3.17", mine, "3.17") == "WRONG(empty)"
    assert (
        verdict_of(FACTOR * rows_of(3, 17, 1, Mark.LEAK) + OFFSET, "3.17", rows_of(3, 17, 1), "3.17") != "OK"
    )


def test_growing_memory_is_found() -> None:
    windows = [Window(60.0 * minute, 60.0 * minute + 30, faults=False) for minute in range(10)]

    def grown(per_minute: int) -> bool:
        samples = [
            Sample(60.0 * minute + second, role, (100 + growing * minute) << 20, 20, 30)
            for role, growing in (("the supervisor", 0), ("the server processes", per_minute))
            for minute in range(10)
            for second in range(0, 30, 2)
        ]
        growth = report.growth(samples, windows)
        assert growth["the supervisor"]["memory"]["per_minute"] == 0
        assert growth["the server processes"]["memory"]["per_minute"] == pytest.approx(
            per_minute, rel=0.05, abs=1e-6
        )
        rows = report.latencies(windows, [])
        return report.verdicts(Account(), growth, rows, {}, [], [], long=True)["memory flat"]

    assert grown(0)
    assert not grown(20)


def test_the_counters_must_add_up() -> None:
    def holds(accepted: int, ended: int) -> bool:
        counters = {"a": {"m": (accepted, ended)}}
        return report.verdicts(Account(), {}, [], counters, [], [], long=False)[
            "the servers' counters add up"
        ]

    assert holds(7, 7)
    assert not holds(7, 6)


def test_latency_is_of_the_calls_answered_in_a_window() -> None:
    windows = [Window(0.0, 10.0, faults=True), Window(10.0, 20.0, faults=False)]
    answers = [Answer(at, took, "robin") for at, took in ((1.0, 0.5), (11.0, 0.1), (12.0, 0.2), (13.0, 0.3))]
    first, second = report.latencies(windows, [*answers, Answer(14.0, 9.0, "stream")])
    assert (first["p50_ms"], first["answers_per_s"]) == (500.0, 0.1)
    assert (second["p50_ms"], second["p99_ms"]) == pytest.approx((200.0, 300.0))
