from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove this machine's TENSORFERRY_ variables, and keep the configuration of logging."""
    for name in list(os.environ):
        if name.startswith("TENSORFERRY_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("tensorferry.server.observability.logs.logs.configure", lambda *arguments: None)
