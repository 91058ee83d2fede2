"""The best batch size, and what a bound of latency admits."""

from __future__ import annotations

from tensorferry.server.onnx.measuring.batch_sizes import best_size, full_batch, within
from tensorferry.server.onnx.measuring.batch_times import BatchTime


def times(**milliseconds: float) -> list[BatchTime]:
    return [BatchTime(int(rows[1:]), value / 1e3, 5) for rows, value in milliseconds.items()]


def test_the_best_size_is_the_smallest_with_nearly_the_most_rows_per_second() -> None:
    # 1,000, 1,333, 1,900 and 2,000 rows/s.
    found = times(_1=1.0, _2=1.5, _19=10.0, _40=20.0)
    best = best_size(found)
    assert best is not None
    assert best.rows == 19
    assert best_size(found[:2]) == found[1]
    assert best_size([]) is None
    assert best_size(times(_1=1.0, _2=4.0, _4=12.0)) == times(_1=1.0)[0], "more rows are slower for each"


def test_a_full_batch_is_the_one_that_the_server_learns_from_such_times() -> None:
    rising = times(_1=20.0, _2=36.0, _4=90.0, _8=200.0)
    assert full_batch(rising, 32) == 2
    assert full_batch(times(_1=20.0, _2=39.0, _3=50.0, _4=80.0), 4) == 4, (
        "within 5 %; 3 rows are no size of the server"
    )
    assert full_batch(rising, 1) is None
    assert full_batch([], 32) is None


def test_sizes_above_one_that_is_too_slow_do_not_count() -> None:
    found = times(_1=1.0, _2=9.0, _4=3.0)
    assert within(found, 5e-3) == (found[0], found[0])
