"""What a front-end takes of the server's limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.front_end.process import share_of


@pytest.mark.parametrize(("limit", "part"), [(0, 0), (1, 1), (6, 2), (7, 3)])
def test_a_front_end_has_its_part_of_what_protects_a_process(limit: int, part: int) -> None:
    limits: Any = {
        "max_connections": limit,
        "max_calls": limit,
        "max_unsent_bytes": limit,
        "max_streams": limit,
    }
    config = replace(ServerConfig(models=()), **limits)
    share = share_of(config, 3)
    assert {name: getattr(share, name) for name in limits} == dict.fromkeys(limits, part)
    assert share == replace(config, **{name: getattr(share, name) for name in limits})


def test_the_default_limit_of_streams_is_not_divided() -> None:
    assert share_of(ServerConfig(models=()), 3).max_streams is None
