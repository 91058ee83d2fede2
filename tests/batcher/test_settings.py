"""Options that make no sense are refused at once, and named with their values."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from batcher.conftest import Make

from tensorferry.batcher import Batcher, ClientPolicy, Padding, PadInput, QueuePolicy
from tensorferry.batcher.settings import BatcherSettings

POLICY = QueuePolicy(5.0, delays=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_batch_size": -1}, "^max_batch_size is -1; it must be at least 0 and finite$"),
        ({"max_queue_delay": -0.1}, "^max_queue_delay is -0.1; it must be at least 0 and finite$"),
        ({"max_queue_delay": float("nan")}, "max_queue_delay is nan"),
        ({"max_queue_delay": float("inf")}, "max_queue_delay is inf"),
        ({"max_queue_size": 0}, "^max_queue_size is 0; it must be at least 1 and finite$"),
        ({"max_queue_bytes": 0}, "max_queue_bytes is 0"),
        ({"workers": 0}, "workers is 0"),
        ({"model_fn": []}, "model_fn has 0 functions"),
        ({"model_fn": [abs, abs], "workers": 2}, "model_fn has 2 functions and workers is 2"),
        ({"priority_weights": ()}, r"priority_weights is \(\)"),
        ({"priority_weights": (2, 0)}, r"priority_weights is \(2, 0\); give each class at least 1"),
        ({"default_priority": 2}, "default_priority is 2; there are 1 classes"),
        ({"default_priority": -1}, "default_priority is -1; it must be at least 0"),
        ({"preferred_batch_sizes": [2], "max_batch_size": 0}, "preferred_batch_sizes is"),
        ({"preferred_batch_sizes": [0]}, r"preferred_batch_sizes is \(0,\); each must be from 1 to .* 8"),
        ({"preferred_batch_sizes": [4, 9]}, r"preferred_batch_sizes is \(4, 9\); each must be"),
        ({"policies": [POLICY, POLICY]}, "policies has 2 entries; give each of the 1 classes one"),
        ({"policies": [POLICY, POLICY], "priority_weights": (2, 1)}, "give strict_priorities"),
        ({"merge": False, "max_queue_delay": 1.0}, "leave out max_queue_delay, 1.0"),
        ({"merge": False, "preferred_batch_sizes": (2,)}, r"preferred_batch_sizes, \(2,\)"),
        ({"max_batch_size": 0, "padding": Padding((4,), PadInput(1, 0))}, "max_batch_size is 0"),
    ],
    ids=str,
)
def test_an_option_is_named_with_its_value(options: dict[str, Any], said: str) -> None:
    threads = threading.active_count()
    with pytest.raises(ValueError, match=said):
        Batcher(**{"model_fn": abs, "max_batch_size": 8, **options})
    # Another test's thread may end meanwhile.
    assert threading.active_count() <= threads


@pytest.mark.parametrize(
    ("policy", "fields", "said"),
    [
        (QueuePolicy, {"timeout": 0.0}, "timeout is 0.0"),
        (QueuePolicy, {"max_requests": -1}, "max_requests is -1"),
        (ClientPolicy, {"max_rows": -1}, "must be at least"),
        (ClientPolicy, {"rate": float("nan")}, "must be at least"),
        (ClientPolicy, {"weights": {"a": 0}}, "must be at least"),
    ],
)
def test_a_policy_is_named_with_its_value(policy: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        policy(**fields)


def test_limits_that_no_full_batch_passes_are_warned_of(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    assert not list(BatcherSettings(8, max_queue_size=8).warnings())
    batcher = make(lambda x: x, 8, max_queue_size=4, name="tight")
    assert "no batch can have more than 4 rows" in batcher.statistics().warnings[0]
    assert "tight: no batch can have more than 4 rows" in caplog.text
