"""Models that are loaded as the server loads them, but not served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.models.load_context import LoadContext
from tensorferry.server.models.loader import load_model
from tensorferry.server.models.registry import Model, ModelRegistry
from tensorferry.server.runtime.devices import choose_device


def loaded_models(
    sources: Sequence[ModelSource], config: ServerConfig
) -> Iterator[tuple[ModelSource, Model]]:
    """Load models, each of which may use those before it; yield each. They are closed at the end of the iteration.

    StartError if one cannot be loaded.
    """
    registry = ModelRegistry()
    devices = {config.device: choose_device(config.device)}
    context = LoadContext(config, devices, served=registry.get, step_model=registry.step_model)
    with ExitStack() as loaded:
        for source in sources:
            model = load_model(source, context)
            loaded.callback(model.release)
            loaded.callback(model.batcher.close)
            registry.mark_ready(model)
            yield source, model
