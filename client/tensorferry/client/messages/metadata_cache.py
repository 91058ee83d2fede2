"""The metadata of the models that a client has met."""

from __future__ import annotations

import grpc

from tensorferry.client.errors import InferenceError, InvalidInput
from tensorferry.client.messages import tensors
from tensorferry.client.messages.metadata import ModelMetadata
from tensorferry.client.messages.tensors import StreamRequest
from tensorferry.protos import inference_pb2 as pb

_STALE_CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


class MetadataCache:
    """Model and version → metadata, until the server refuses a request that fits it.

    May be used from any thread: each method is one operation on a dict.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], ModelMetadata] = {}

    def get(self, model: str, version: str) -> ModelMetadata | None:
        """The metadata, None when it is to be fetched."""
        return self._known.get((model, version))

    def encode(self, model: str, version: str, request: StreamRequest) -> pb.ModelInferRequest | None:
        """The request's message; None when the metadata is to be fetched, perhaps again."""
        known = self._known.get((model, version))
        if known is None:
            return None
        try:
            return tensors.encode(model, version, request, known)
        except InvalidInput:
            return None  # the model may have been replaced since its metadata was fetched

    def put(self, model: str, version: str, metadata: ModelMetadata) -> None:
        """The server's answer."""
        self._known[model, version] = metadata

    def refused(self, model: str, version: str, error: InferenceError) -> None:
        """The server refused a request: after some codes the metadata may be out of date."""
        if error.code in _STALE_CODES:
            self._known.pop((model, version), None)
