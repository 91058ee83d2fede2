"""The protocol's extension `model_configuration`: what a model is configured with, for clients to see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.models.registry import ModelRegistry


class ModelConfigMethods:
    """ModelConfig. Implements the servicer's `Extension`; thread-safe."""

    names: Sequence[str] = ("model_configuration",)

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """ModelConfig alone."""
        return {"ModelConfig": self.model_config}

    def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """The completed configuration: what is really used. Of a model that is ready, as its other methods."""
        return pb.ModelConfigResponse(config=self._registry.get(request.name, request.version).config)
