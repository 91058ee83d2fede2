"""Common parts of the synchronous and the asyncio client: arguments, metadata cache, retries."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeVar

import grpc

from tensorferry.client.connection import channel
from tensorferry.client.connection.bearer import bearer
from tensorferry.client.connection.context import (
    CallContext,
    CallSettings,
    Compression,
    Headers,
    compression_of,
)
from tensorferry.client.connection.endpoints import (
    MOST_CONNECTIONS,
    Endpoints,
    connections_for,
    open_endpoints,
)
from tensorferry.client.connection.retry import DEFAULT_RETRY, Attempts, Retry, RetryBudget, retry_of
from tensorferry.client.connection.target import targets_of
from tensorferry.client.errors import ClientClosed, InferenceError, InvalidInput
from tensorferry.client.messages import answers, arguments, chunks, codec
from tensorferry.client.messages.codec import StreamRequest
from tensorferry.client.messages.metadata import ModelMetadata, server_processes
from tensorferry.client.messages.metadata_cache import MetadataCache
from tensorferry.client.messages.results import Answer
from tensorferry.protos import inference_pb2 as pb

T = TypeVar("T")


class ClientBase(ABC):
    """State of a client; subclasses open its channels and make its calls."""

    def __init__(
        self,
        target: str | Sequence[str] | None = None,
        *,
        tls: bool | channel.Tls = False,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Headers = (),
        compression: Compression = "none",
        max_message_bytes: int = channel.DEFAULT_MAX_MESSAGE_BYTES,
        options: channel.ChannelOptions = (),
        check: bool = True,
        retry: Retry | None = DEFAULT_RETRY,
        token: str | None = None,
        token_over_plaintext: bool = False,
        connections: int | None = None,
    ) -> None:
        # All arguments, for a pickle of the client. First, while there is no other variable.
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        targets = self._arguments["target"] = targets_of(target)
        secured = channel.channel_credentials(tls, credentials)
        sent_token = bearer(token, targets, secure=secured is not None, over_plaintext=token_over_plaintext)
        self._settings = CallSettings(
            channel.call_metadata(metadata) + sent_token, compression_of(compression)
        )
        self._check = check
        self._retries = RetryBudget(retry_of(retry))
        self._cache = MetadataCache(max_message_bytes)
        self._closed = False
        channel_options = channel.channel_options(max_message_bytes, options)
        # None: as many as the server needs.
        self._connections = connections
        first = (
            1 if connections is None else arguments.integer("connections", connections, 1, MOST_CONNECTIONS)
        )
        self._open(functools.partial(open_endpoints, targets, secured, channel_options, first))

    @abstractmethod
    def _open(self, endpoints: Callable[[Any], Endpoints]) -> None:
        """Prepare the client; `endpoints` opens channels of `grpc` or `grpc.aio`, which connect with their first call."""

    @property
    @abstractmethod
    def _endpoints(self) -> Endpoints:
        """The servers of the client."""

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        """Pickle the arguments: the copy opens channels of its own."""
        self._check_open()
        if self._arguments["credentials"] is not None:
            raise TypeError(
                f"a client with credentials={self._arguments['credentials']!r} cannot be pickled, because"
                " grpcio's credentials cannot: give the files with tls=Tls(...), or make the client in the"
                " other process"
            )
        return functools.partial(type(self), **self._arguments), ()

    def _check_open(self) -> None:
        if self._closed:
            text = "this InferenceClient is closed: create another one"
            raise ClientClosed(grpc.StatusCode.FAILED_PRECONDITION, text)

    def _call_options(self, context: CallContext) -> dict[str, Any]:
        """Return the options of one attempt of a call; raise if the client is closed or no time is left."""
        self._check_open()
        return context.options()

    def _begin(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Begin a call; raise ClientClosed if another thread has closed the client since `_call_options`."""
        try:
            return call(*arguments, **options)
        except ValueError:  # of grpcio, for a closed channel
            self._check_open()
            raise

    def _attempts(self, request: object) -> Attempts:
        return Attempts(self._retries, request, self._endpoints)

    def _store(self, model: str, version: str, metadata: ModelMetadata) -> None:
        """Store the server's answer, and open the connections that its processes need."""
        self._cache.put(model, version, metadata)
        if self._connections is None:
            self._endpoints.grow(connections_for(server_processes(metadata)))

    def _encode_known(self, model: str, version: str, request: StreamRequest) -> pb.ModelInferRequest | None:
        """Return the request's message; None if the model's metadata must be fetched, perhaps again."""
        arguments.model(model, version)
        if not self._check:
            return codec.encode(model, version, request, None)
        known = self._cache.get(model, version)
        if known is None:
            return None
        try:
            return codec.encode(model, version, request, known)
        except InvalidInput:
            return None  # the model may have been replaced since its metadata was fetched

    def _difference(self, request: pb.ModelInferRequest, answer: Answer[Any]) -> InferenceError | None:
        """Return how the answer differs from the known metadata; raise Internal if it differs from the request."""
        answers.check(request, answer)
        declared = self._cache.outputs(request.model_name, request.model_version) if self._check else None
        return None if declared is None else answers.difference(request, answer, declared)

    def _parts(
        self, model: str, version: str, request: StreamRequest, encoded: pb.ModelInferRequest
    ) -> Iterable[pb.ModelInferRequest]:
        """Return the request's message, or those of its parts if it is above the server's limits."""
        limits = self._cache.limits(model, version) if self._check else None
        if limits is None or limits.admit(encoded):
            return (encoded,)
        known = self._cache.get(model, version)
        return (encoded,) if known is None else chunks.split(request, encoded, known, limits)
