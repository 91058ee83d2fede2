"""Common parts of the synchronous and the asyncio client: arguments, metadata cache, retries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from tensorferry.client import errors
from tensorferry.client.connection import channel
from tensorferry.client.connection.bearer import bearer
from tensorferry.client.connection.deadline import Deadline, seconds_of
from tensorferry.client.connection.propagation import with_context
from tensorferry.client.connection.retry import DEFAULT_RETRY, Attempts, Retry, RetryBudget, retry_of
from tensorferry.client.connection.target import check_target
from tensorferry.client.errors import InvalidInput
from tensorferry.client.inflight import InFlight
from tensorferry.client.messages import arguments, codec
from tensorferry.client.messages.codec import Parameter, StreamDefaults, StreamRequest
from tensorferry.client.messages.metadata import ModelMetadata
from tensorferry.client.messages.metadata_cache import MetadataCache
from tensorferry.protos import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The checked arguments of one stream."""

    model: str
    version: str
    timeout: float | None
    in_flight: InFlight
    defaults: StreamDefaults
    order: channel.CallMetadata
    raises: bool


class ClientBase(ABC):
    """State of a client; subclasses open its channels and make its calls."""

    def __init__(
        self,
        target: str,
        *,
        tls: bool | channel.Tls = False,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        max_message_bytes: int = channel.DEFAULT_MAX_MESSAGE_BYTES,
        options: channel.ChannelOptions = (),
        check: bool = True,
        retry: Retry | None = DEFAULT_RETRY,
        token: str | None = None,
        token_over_plaintext: bool = False,
    ) -> None:
        check_target(target)
        secured = channel.channel_credentials(tls, credentials)
        self._metadata = channel.call_metadata(metadata) + bearer(
            token, target, secure=secured is not None, over_plaintext=token_over_plaintext
        )
        self._check = check
        self._retries = RetryBudget(retry_of(retry))
        self._cache = MetadataCache()
        self._closed = False
        self._open(target, secured, channel.channel_options(max_message_bytes, options))

    @abstractmethod
    def _open(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None,
        options: list[tuple[str, str | int]],
    ) -> None:
        """Create the channels; each connects with its first call."""

    def _check_open(self) -> None:
        if self._closed:
            raise errors.closed_before_call()

    def _call_options(
        self, deadline: Deadline, request_id: str = "", *, wait_for_ready: bool | None = None
    ) -> dict[str, Any]:
        """Return the options of one attempt of a call; raise if the client is closed or no time is left."""
        self._check_open()
        return {
            "timeout": deadline.for_call(request_id),
            "metadata": with_context(self._metadata),
            "wait_for_ready": wait_for_ready,
        }

    def _attempts(self, request: object) -> Attempts:
        return Attempts(self._retries, request)

    def _encode_known(self, model: str, version: str, request: StreamRequest) -> pb.ModelInferRequest | None:
        """Return the request's message, or None if the model's metadata must be fetched first."""
        arguments.model(model, version)
        if not self._check:
            return codec.encode(model, version, request, None)
        return self._cache.encode(model, version, request)

    def _learned(self, model: str, version: str, answer: pb.ModelMetadataResponse) -> ModelMetadata:
        metadata = ModelMetadata.from_message(answer)
        self._cache.put(model, version, metadata)
        return metadata

    def _plan_stream(
        self,
        model: str,
        version: str,
        ordered: bool,
        max_in_flight: int,
        timeout: float | None,
        outputs: Sequence[str] | None,
        parameters: Mapping[str, Parameter] | None,
        on_error: str,
    ) -> StreamPlan:
        arguments.model(model, version)
        if on_error not in ("raise", "yield"):
            change = "'raise' ends the stream, 'yield' goes on"
            raise InvalidInput("on_error", "'raise' or 'yield'", arguments.shown(on_error), change)
        return StreamPlan(
            model,
            version,
            seconds_of(timeout),
            InFlight(max_in_flight, ordered=ordered),
            StreamDefaults(outputs, parameters),
            () if ordered else channel.COMPLETION_ORDER,
            on_error == "raise",
        )
