"""Cache of model metadata."""

from __future__ import annotations

import grpc

from tensorferry.client.errors import InferenceError
from tensorferry.client.messages.answers import DeclaredOutputs, declared_outputs
from tensorferry.client.messages.chunks import Limits, limits_of
from tensorferry.client.messages.metadata import ModelMetadata

_STALE_CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


class MetadataCache:
    """Metadata by model and version, kept until the server refuses a request that fits it.

    Thread-safe: each method is one operation on a dict.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._known: dict[tuple[str, str], ModelMetadata] = {}
        self._limits: dict[tuple[str, str], Limits | None] = {}
        self._outputs: dict[tuple[str, str], DeclaredOutputs | None] = {}

    def get(self, model: str, version: str) -> ModelMetadata | None:
        """Return the metadata, None if it must be fetched."""
        return self._known.get((model, version))

    def put(self, model: str, version: str, metadata: ModelMetadata) -> None:
        """Store the server's answer."""
        self._limits[model, version] = limits_of(metadata, self._max_message_bytes)
        self._outputs[model, version] = declared_outputs(metadata)
        self._known[model, version] = metadata

    def limits(self, model: str, version: str) -> Limits | None:
        """Return the limits of a model whose requests may be split."""
        return self._limits.get((model, version))

    def outputs(self, model: str, version: str) -> DeclaredOutputs | None:
        """Return what is known of the model's answers; None for nothing."""
        return self._outputs.get((model, version))

    def refused(self, model: str, version: str, error: InferenceError) -> None:
        """Drop the metadata if the error's code means that it may be out of date."""
        if error.code in _STALE_CODES:
            self._known.pop((model, version), None)

    def forget(self, model: str) -> None:
        """Drop the metadata of all versions of a model that the caller has changed."""
        for key in [key for key in list(self._known) if key[0] == model]:
            self._known.pop(key, None)
