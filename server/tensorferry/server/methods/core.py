"""The protocol's metadata methods: ServerLive, ServerReady, ModelReady, ServerMetadata, ModelMetadata, ModelConfig."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorferry.batcher import StatefulBatcher
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import InvalidRequestError, ServerError
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.config_pbtxt.pbtxt import PLATFORM
from tensorferry.server.models.lifecycle.registry import ModelRegistry, ModelState

_OWN_EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "parameters",
    "schedule_policy",
    "sequence",
)

# Verdicts of models whose rows are independent, so that a request may be split.
_INDEPENDENT = ("proved", "tested", "trusted")


class CoreMethods:
    """The metadata methods over one service and one registry. Thread-safe.

    `extensions` are the names of the other extensions that the server has, for ServerMetadata. `processes` is the number of
    its processes, for ModelMetadata: a client opens more connections if there are several.
    """

    names: Sequence[str] = _OWN_EXTENSIONS

    def __init__(
        self,
        service: InferenceService,
        registry: ModelRegistry,
        *,
        version: str,
        extensions: Sequence[str] = (),
        processes: int = 1,
    ) -> None:
        self._service = service
        self._registry = registry
        self._version = version
        self._processes = processes
        self._extensions = sorted({*_OWN_EXTENSIONS, *extensions})

    def methods(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return the methods by name."""
        return {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelConfig": self.model_config,
        }

    def server_live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """Return true, because the process answers."""
        return pb.ServerLiveResponse(live=True)

    def server_ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Return `InferenceService.ready`."""
        return pb.ServerReadyResponse(ready=self._service.ready)

    def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Return whether the model takes requests; false, not an error, for an unknown model."""
        try:
            self._registry.get(request.name, request.version)
        except InvalidRequestError:
            raise
        except ServerError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=not self._service.lame_duck)

    def server_metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """Return name, version and extensions of the server."""
        return pb.ServerMetadataResponse(
            name="tensorferry", version=self._version, extensions=self._extensions
        )

    def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """Return the model's signature, in which -1 is a variable dimension."""
        model = self._registry.get(request.name, request.version)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        properties = {
            "batching": model.batching,
            "batching_verdict": model.batching_verdict,
        }
        axes = model.signature.batch_axes
        if isinstance(model.batcher, StatefulBatcher):
            properties["states"] = ",".join(f"{one}={other}" for one, other in model.batcher.states.items())
        if axes:
            properties["batch_axes"] = ",".join(f"{name}={axis}" for name, axis in axes.items())
        elif (
            model.batched
            and model.batching_verdict in _INDEPENDENT
            # A request of a sequence has one row.
            and not isinstance(model.batcher, StatefulBatcher)
        ):
            # Clients split larger requests, along axis 0.
            limits = self._service.limits
            properties["max_request_rows"] = str(limits.rows or model.batcher.settings.max_queue_size)
            bounds = [spec.most_bytes for spec in model.signature.inputs if spec.most_bytes]
            properties["max_message_bytes"] = str(min([limits.message_bytes, *bounds]))
        if model.streams:
            properties["streams"] = "true"
        if model.task is not None:
            properties["task"] = model.task.kind
            properties["served_as"] = json.dumps(model.task.served_as)
            if model.task.labels:
                properties["labels"] = json.dumps(model.task.labels)
            if model.task.normalized:
                properties["normalized"] = "true"
        if self._processes > 1:
            properties["server_processes"] = str(self._processes)
        if model.signature.optional:
            properties["optional_inputs"] = ",".join(spec.name for spec in model.signature.optional)
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[
                entry.version
                for entry in self._registry.entries()
                if entry.name == model.name and entry.state is ModelState.READY
            ],
            platform=model.config.platform or PLATFORM,
            inputs=[
                tensor(name=s.name, datatype=s.datatype.name, shape=s.shape)
                for s in model.signature.inputs + model.signature.optional
            ],
            outputs=[
                tensor(name=s.name, datatype=s.datatype.name, shape=s.shape) for s in model.signature.outputs
            ],
            properties=properties,
        )

    def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """Return the configuration in use, with every default filled in. The model must be ready."""
        return pb.ModelConfigResponse(config=self._registry.get(request.name, request.version).config)
