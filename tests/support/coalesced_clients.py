"""Tests of the client that run twice: each call alone, and calls joined."""

from __future__ import annotations

import pytest

from tensorferry.client import Coalesce, base


@pytest.fixture(params=["alone", "coalesced"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every client that checks requests join calls, as if it were created with `coalesce=True`."""
    if request.param == "coalesced":
        monkeypatch.setattr(base, "coalesce_of", lambda _, check: Coalesce() if check else None)
