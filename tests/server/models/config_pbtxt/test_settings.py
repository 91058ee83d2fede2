"""The settings of a model follow from its completed configuration."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tensorferry.batcher import QueuePolicy
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import ModelConfigError
from tensorferry.server.models.config_pbtxt.instance_groups import instance_groups
from tensorferry.server.models.config_pbtxt.pbtxt import BatchingDecision, parse_config
from tensorferry.server.models.config_pbtxt.settings import ModelSettings, settings_of
from tensorferry.server.runtime.devices import AvailableDevices
from tensorferry.server.runtime.ort_options import OrtOptions


def settings(
    text: str, *, most: int = 8, merges: bool = True, generated: bool = False, **options: Any
) -> ModelSettings:
    config = parse_config(text, "test")
    config.name, config.max_batch_size = "m", most
    groups = instance_groups(config, "m", AvailableDevices())
    return settings_of(
        config,
        BatchingDecision(most, merges, ""),
        groups,
        ServerConfig((), **options),
        OrtOptions(),
        generated=generated,
    )


def test_generated_priority_classes_share_by_weight() -> None:
    found = settings(
        "dynamic_batching { priority_levels: 2 default_priority_level: 2 max_queue_delay_microseconds: 100 }",
        generated=True,
        priority_weights=(8, 1),
    )
    assert (found.priority_weights, found.strict_priorities, found.default_priority) == ((8, 1), False, 0)
    assert found.max_queue_delay == 1e-4


def test_requests_that_share_no_batch_have_no_queue_delay() -> None:
    found = settings("dynamic_batching { default_queue_policy { max_queue_size: 3 } }", merges=False)
    assert (found.merges, found.max_queue_delay, found.preferred_batch_sizes) == (False, 0.0, ())
    assert found.policies == (QueuePolicy(math.inf, max_requests=3),)


DELAYING = "timeout_action: DELAY default_timeout_microseconds: 5"


@pytest.mark.parametrize(
    ("batching", "message"),
    [
        ("preferred_batch_size: 0", "dynamic batching preferred size must be positive for m, got 0"),
        ("preferred_batch_size: 9", "dynamic batching preferred size must be <= max batch size for m, got 9 and 8"),
        (
            "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value { } }",
            r"priority queue policy must have priority level in range \[1, 2\] for m, got 3",
        ),
        ("priority_levels: 18446744073709551615 default_priority_level: 1", "at most 64"),
        (
            "preserve_ordering: true priority_levels: 1 default_priority_level: 1 "
            f"priority_queue_policy {{ key: 1 value {{ {DELAYING} }} }}",
            "Queue policy can not have DELAY as timeout action",
        ),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(batching: str, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        settings(f"dynamic_batching {{ {batching} }}")


def test_a_default_level_is_ignored_without_levels() -> None:
    made = settings(f"dynamic_batching {{ default_priority_level: {(1 << 64) - 1} }}")
    assert (made.priority_weights, made.default_priority) == ((1,), 0)
