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


def test_a_size_that_is_slower_for_each_row_is_never_the_best() -> None:
    assert best_size(times(_1=1.0, _2=4.0, _4=12.0)) == times(_1=1.0)[0]


def test_a_full_batch_is_the_one_that_the_server_learns_from_such_times() -> None:
    rising = times(_1=20.0, _2=36.0, _4=90.0, _8=200.0)
    assert full_batch(rising, 32) == 2
    assert full_batch(times(_1=20.0, _2=39.0, _3=50.0, _4=80.0), 4) == 4, (
        "within 5 %; 3 rows are no size of the server"
    )
    assert full_batch(rising, 1) is None
    assert full_batch([], 32) is None


def test_a_bound_admits_the_largest_batch_in_time_alone_and_after_another() -> None:
    found = times(_1=1.0, _2=1.5, _4=2.5, _8=5.0)
    assert within(found, 5e-3) == (found[3], found[2])
    assert within(found, 4.9e-3) == (found[2], found[1])
    assert within(found, 1e-3) == (found[0], None)
    assert within(found, 0.5e-3) == (None, None)
    # Sizes above one that is too slow do not count.
    assert within(times(_1=1.0, _2=9.0, _4=3.0), 5e-3) == (found[0], found[0])
