"""Limit on repeated warnings."""

from __future__ import annotations

import logging

import pytest

from tensorferry.server.observability.logs import repeated_warnings
from tensorferry.server.observability.logs.log_format import JsonFormatter, text_formatter
from tensorferry.server.observability.logs.repeated_warnings import MAX_REPEATS, PERIOD_SECONDS, RepeatLimit


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limit(clock: Clock) -> RepeatLimit:
    return RepeatLimit(clock)


def record(
    model: object = "m", *, words: str = "model %s failed: %s", level: int = logging.WARNING
) -> logging.LogRecord:
    return logging.LogRecord("tensorferry.server", level, "", 1, words, (model, "why"), None)


def shown(limit: RepeatLimit, count: int, model: str = "m", **more: int) -> int:
    return sum(limit.filter(record(model, **more)) for _ in range(count))  # type: ignore[arg-type]


def test_ten_lines_a_minute_pass_and_the_others_are_counted(limit: RepeatLimit, clock: Clock) -> None:
    assert shown(limit, 2000) == MAX_REPEATS
    clock.now += PERIOD_SECONDS - 1
    assert shown(limit, 1) == 0
    clock.now += 1
    first, second = record(), record()
    assert limit.filter(first)
    assert limit.filter(second)
    assert first.repeats_left_out == 2001 - MAX_REPEATS  # type: ignore[attr-defined]
    assert not hasattr(second, "repeats_left_out")


def test_other_models_other_templates_and_lower_levels_are_not_limited(limit: RepeatLimit) -> None:
    assert shown(limit, 50) == MAX_REPEATS
    assert shown(limit, 50, "n") == MAX_REPEATS
    assert limit.filter(record(words="model %s is slow: %s"))
    assert shown(limit, 400, level=logging.INFO) == 400


def test_left_out_lines_are_reported_once(limit: RepeatLimit, clock: Clock) -> None:
    shown(limit, MAX_REPEATS + 5)
    shown(limit, MAX_REPEATS + 2, "n")
    assert [limit.take_left_out(), limit.take_left_out()] == [7, 0]


def test_the_number_of_subjects_is_limited(limit: RepeatLimit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_warnings, "_MAX_KEYS", 100)
    for number in range(1000):
        assert limit.filter(record(f"client {number}"))
    assert len(limit._periods) == 100


def test_a_destructor_may_log_while_its_thread_logs(limit: RepeatLimit) -> None:
    """The garbage collector may run in `filter`."""
    with limit._lock:
        assert limit.filter(record())


@pytest.mark.parametrize("arguments", [(), (3,), ({"a": 1},)])
def test_any_arguments_are_accepted(limit: RepeatLimit, arguments: tuple[object, ...]) -> None:
    words = "%s" if arguments else "words"
    made = logging.LogRecord("any", logging.ERROR, "", 1, words, arguments, None)
    assert limit.filter(made)


def test_a_text_line_contains_the_count() -> None:
    made = record()
    made.repeats_left_out = 7
    assert text_formatter(False).format(made).endswith("model m failed: why (7 more like this were left out)")
    assert '"repeats_left_out": 7' in JsonFormatter().format(made)
