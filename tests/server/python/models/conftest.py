"""Functions that are loaded as models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.models.lifecycle.registry import Model

LoadFunction = Callable[..., Model]


@pytest.fixture
def load() -> Iterator[LoadFunction]:
    """Load declared functions; their batchers are closed after the test."""
    loaded: list[Model] = []

    def load(declared: Any, **options: Any) -> Model:
        source = ModelSource(declared.name, Path("app.py"), declaration=declared)
        loaded.append(load_model(source, LoadContext(ServerConfig((source,), **options))))
        return loaded[-1]

    yield load
    for each in loaded:
        each.batcher.close()
        each.release()
