"""Queue of one class: the order is kept, whatever is removed or queued again."""

from __future__ import annotations

import math
from itertools import count

from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import reproducible

from tensorferry.batcher.queue.backlog import ClassQueue, edf_key
from tensorferry.batcher.request import Outcome, Request


def made(deadline: float, order: int) -> Request:
    def complete(outcome: Outcome) -> None:
        """Ignore the outcome."""

    request = Request((), complete, names=None, rows=1, nbytes=0, deadline=deadline)
    request.order = order
    return request


@reproducible
@given(st.data())
def test_it_is_as_a_sorted_list(data: st.DataObject) -> None:
    queue, model = ClassQueue(), list[Request]()
    left: list[Request] = []
    orders = count(1)
    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(["add", "add", "again", "head", "some"]))
        if step in ("add", "again"):
            if step == "again" and left:
                request = left.pop(data.draw(st.integers(0, len(left) - 1)))
            else:
                request = made(data.draw(st.sampled_from([1.0, 2.0, math.inf])), next(orders))
            model.append(request)
            model.sort(key=edf_key)
            queue.add(request)
        elif model:
            if step == "head":
                gone = model[: data.draw(st.integers(1, len(model)))]
            else:
                gone = data.draw(st.lists(st.sampled_from(model), min_size=1, unique=True))
            queue.remove_all(gone, len(gone))
            model = [request for request in model if request not in gone]
            left += gone
        assert list(queue) == model
        assert len(queue) == queue.rows == len(model)
        assert all(request.deadline < math.inf for request in queue.with_deadline)
        assert all(request.deadline == math.inf for request in queue.without_deadline)
