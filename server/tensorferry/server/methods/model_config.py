"""ModelConfig: lets clients read a model's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.models.lifecycle.registry import ModelRegistry


class ModelConfigMethods:
    """The protocol's extension `model_configuration`. Thread-safe."""

    names: Sequence[str] = ("model_configuration",)

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return the method ModelConfig."""
        return {"ModelConfig": self.model_config}

    def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """Return the configuration in use, with every default filled in. The model must be ready."""
        return pb.ModelConfigResponse(config=self._registry.get(request.name, request.version).config)
