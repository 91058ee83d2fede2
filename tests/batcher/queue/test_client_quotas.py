"""The product's queue in virtual time, with clients that together exceed capacity: fair shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from support.batcher.virtual_time import Sender, answered

from tensorferry.batcher import ClientPolicy

FAIR = ClientPolicy(fair=True)

# With deadlines, a long queue refuses greedy clients behind their own queued requests, which leaves
# room for others. A short queue they keep full, and other clients are refused.
WORLDS: Mapping[str, tuple[Mapping[str, Sender], Mapping[str, Any]]] = {
    "two clients with deadlines": ({"greedy": Sender(10), "meek": Sender(0.3), "other": Sender(0.25)}, {}),
    "no deadlines, a full queue": (
        {"greedy": Sender(10, 0, rows=4), "meek": Sender(0.3, 0, rows=8)},
        {"max_queue_size": 64},
    ),
    "kinds that share no batch": (
        {"greedy": Sender(5, 0.1, kinds=4), "meek": Sender(0.3, 0.1)},
        {"seconds": 0.8},
    ),
    "pipelined": ({"greedy": Sender(10, 0.06), "meek": Sender(0.3, 0.06)}, {"pipelined": True}),
}


@pytest.mark.parametrize("world", WORLDS)
def test_a_greedy_client_takes_nothing_of_anothers_share(world: str) -> None:
    """A client below its share gets all it asks for, and the total is no less than without fair
    shares.
    """
    senders, options = WORLDS[world]
    options = {"seconds": 0.4, **options}
    without, fair = (answered(senders, clients=policy, **options) for policy in (None, FAIR))
    meek = [name for name in senders if name != "greedy"]
    assert all(without[name] < 0.5 * senders[name].load for name in meek), "what this is against"
    assert all(fair[name] > 0.85 * senders[name].load for name in meek)
    assert sum(fair.values()) >= 0.97 * sum(without.values())


def test_all_want_more_than_there_is() -> None:
    weights = ClientPolicy(fair=True, weights={"a": 3, "b": 1})
    got = answered({"a": Sender(5), "b": Sender(5)}, seconds=0.5, clients=weights)
    assert got["a"] == pytest.approx(0.75, abs=0.05)
    assert got["b"] == pytest.approx(0.25, abs=0.05)
