"""Inputs and outputs of one model in a region of shared memory: what both clients share."""

from __future__ import annotations

from collections.abc import Mapping

from tensorferry.client.connection.system_memory import SystemMemory
from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages import rpcs
from tensorferry.client.messages.codec import InferenceResult, Parameter
from tensorferry.client.messages.metadata import ModelMetadata
from tensorferry.client.messages.rpcs import Rpc
from tensorferry.client.messages.shared_layout import Shapes, layout
from tensorferry.protos.tensors import Array

# Longest wait for the server when a region is unregistered.
RELEASE_SECONDS = 5.0


def check_one_target(targets: tuple[str, ...]) -> None:
    """Raise InvalidInput if requests could reach a server that does not know the region."""
    if len(targets) > 1:
        change = "use a client of one server on this machine"
        raise InvalidInput("shared memory", "a client of one target", f"{len(targets)} targets", change)


class SharedTensors:
    """A region of shared memory, and the arrays of a model's inputs in it."""

    def __init__(self, model: ModelMetadata, version: str, rows: int, shapes: Shapes | None) -> None:
        self._layout = layout(model, version, rows, shapes)
        self._memory = SystemMemory(self._layout.nbytes)
        self.inputs: Mapping[str, Array] = {
            place.name: place.array(self._memory.buffer) for place in self._layout.inputs
        }

    def register(self) -> Rpc[None]:
        """Return the call that registers the region."""
        return rpcs.register_system_memory(self._memory.key, self._memory.nbytes)

    def unregister(self) -> Rpc[None]:
        """Return the call that unregisters the region."""
        return rpcs.unregister_system_memory(self._memory.key)

    def infer(
        self, rows: int | None, request_id: str | None, parameters: Mapping[str, Parameter] | None
    ) -> Rpc[InferenceResult]:
        """Return the call that runs the first rows."""
        message = self._layout.request(self._memory.key, rows, request_id, parameters)
        return Rpc("ModelInfer", message, lambda answer: self._layout.result(answer, self._memory.buffer))

    def unlink(self) -> None:
        """Remove the region's file; the arrays stay usable."""
        self._memory.unlink()
