"""Functions that are loaded as models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.python.models import loading
from tensorferry.server.python.models.load_check import check_at_load

LoadFunction = Callable[..., Model]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadFunction]:
    """Load declared functions; their batchers are closed after the test."""
    # On a busy machine, the largest batch would be left out because one row took long.
    monkeypatch.setattr(loading, "check_at_load", partial(check_at_load, clock=lambda: 0.0))
    loaded: list[Model] = []

    def load(declared: Any, **options: Any) -> Model:
        source = ModelSource(declared.name, Path("app.py"), declaration=declared)
        loaded.append(load_model(source, LoadContext(ServerConfig((source,), **options))))
        return loaded[-1]

    yield load
    for each in loaded:
        each.batcher.close()
        each.release()
