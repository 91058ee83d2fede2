"""Declared models, loaded without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.python.steps.stage_function import CallsOfBatch, no_calls

Load = Callable[..., Model]


@contextmanager
def loading(folder: Path) -> Iterator[Load]:
    """Return a function that loads what an app.py in the folder declares. The models are closed at the end."""
    registry = ModelRegistry()
    loaded: list[Model] = []

    def load(declared: Any, calls: CallsOfBatch = no_calls, **options: Any) -> Model:
        source = ModelSource(declared.name, folder / "app.py", declaration=declared)
        context = LoadContext(ServerConfig((source,), **options), calls=calls, registry=registry)
        loaded.append(load_model(source, context))
        registry.mark_ready(loaded[-1])
        return loaded[-1]

    yield load
    for each in reversed(loaded):
        each.batcher.close()
        each.release()
