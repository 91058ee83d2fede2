"""FIFO with removal: the order of the remaining requests is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensorferry.batcher.queue.fifo import FifoWithTombstones
from tensorferry.batcher.request import Outcome, Request


def made() -> Request:
    def complete(outcome: Outcome) -> None:
        """Ignore the outcome."""

    return Request((), complete, names=None, rows=1, nbytes=0)


def line_of(count: int) -> tuple[FifoWithTombstones, list[Request]]:
    line, requests = FifoWithTombstones(), [made() for _ in range(count)]
    for request in requests:
        line.append(request)
    return line, requests


@given(st.data())
def test_it_is_as_a_list(data: st.DataObject) -> None:
    line, model = FifoWithTombstones(), list[Request]()
    left: list[Request] = []
    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(["append", "append", "head", "first", "some", "one"]))
        if step == "append":
            model.append(made())
            line.append(model[-1])
        elif step == "head":
            # A removed request may be added again, even if it was removed from the middle.
            back = left.pop(data.draw(st.integers(0, len(left) - 1))) if left else made()
            model.insert(0, back)
            line.push_front(back)
        elif model:
            if step == "first":
                gone = model[: data.draw(st.integers(1, len(model)))]
            elif step == "some":
                gone = data.draw(st.lists(st.sampled_from(model), min_size=1, unique=True))
            else:
                gone = [data.draw(st.sampled_from(model))]
            if step == "one":
                line.remove(gone[0])
            else:
                line.remove_all(gone)
            model = [request for request in model if request not in gone]
            left += gone
        assert list(line) == model
        assert list(reversed(line)) == model[::-1]
        assert len(line) == len(model)


def test_removed_requests_are_not_kept() -> None:
    """At most half of the entries: cancelled requests would otherwise be kept as long as others wait."""
    line, requests = line_of(100)
    for request in requests[1:]:
        line.remove(request)
        assert len(line._requests) <= 2 * len(line)
    assert line._requests == requests[:1]


def test_removal_from_the_middle_keeps_the_order() -> None:
    line, requests = line_of(100)
    line.remove(requests[50])
    assert len(line._requests) == 100
    line.remove_all(requests[:50])
    assert list(line) == requests[51:]
    line.remove_all(requests[51:60])
    assert line._requests == requests[60:], "its entry is dropped with those around it"
    assert not line._tombstones
