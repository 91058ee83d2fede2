"""The client for threads: how it is opened and closed, and calls in the background."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import grpc

from tensorferry.client.connection.context import Compression, Headers
from tensorferry.client.connection.endpoints import Endpoints
from tensorferry.client.messages import codec
from tensorferry.client.messages.codec import Inputs, Outputs
from tensorferry.client.messages.results import Parameter
from tensorferry.client.threads import waits
from tensorferry.client.threads.future import InferenceFuture, RetryQueue
from tensorferry.client.threads.inference import InferenceCalls


class InferenceClient(InferenceCalls):
    """A client of one server, or of several equal ones. Use it as a context manager, or call `close`.

    >>> with InferenceClient("127.0.0.1:8001") as client:
    ...     client.infer("digits", {"image": np.zeros((1, 8, 8), np.uint8)})["probabilities"].shape
    (1, 10)

    Arguments:

    - `target`: "host:port", or any other name that gRPC resolves, or a list of these. None takes
      the environment variable TENSORFERRY_TARGET, whose targets are separated by commas, or else
      127.0.0.1:8001.
    - `tls`: True for TLS with the system's certificate authorities, or a `Tls` with files.
    - `credentials`: grpcio's channel credentials, instead of `tls`.
    - `metadata`: metadata of every call. A current OpenTelemetry context is added to it.
    - `compression`: "gzip" or "deflate" compresses every message to the server, "none" none.
    - `token`: bearer token of every call. A token that would leave this machine without TLS raises
      InvalidInput, unless `token_over_plaintext` is true.
    - `max_message_bytes`: bound on a message in either direction.
    - `options`: gRPC channel options, which override those of the client.
    - `check`: compare each request with the model's metadata before it is sent (the default).
      If false, the dtype of each array decides its datatype.
    - `retry`: how calls are repeated, None for never.
    - `connections`: connections to each target, from 1 to 64. None opens as many as the server needs.

    The first call connects, not the constructor. Streams have connections of their own.

    Several processes: a connection reaches one process of a server. A server of several states
    their number in its models' metadata. The client then opens four connections for each process,
    at most 32, and calls and streams take turns.

    Several targets: calls and streams take turns. A target that cannot be reached is left out, and
    its calls go to the next one; every five seconds one call tries it again.

    A pickle of a client has its arguments, the token included. The copy opens its own channels.

    Retries: a call that got UNAVAILABLE, or RESOURCE_EXHAUSTED with a retry time, is sent again
    within its timeout. A call whose connection broke while it was in progress is sent again at
    most once, and never if it is part of a sequence.

    Timeouts: a positive number of seconds for the whole call, retries included. The timeout
    becomes the gRPC deadline. None and infinity mean no limit.

    Errors: calls raise `InferenceError`. Its subclass follows from the server's status code.
    `InvalidInput` (a ValueError) is raised for unusable arguments, and `ClientClosed`
    (a RuntimeError) after `close`.

    Thread-safe: all methods may be called from any number of threads at once.
    """

    def _open(self, endpoints: Callable[[Any], Endpoints]) -> None:
        self._closing = waits.Closing()
        self._retry_queue = RetryQueue()
        self._opened = endpoints(grpc)

    @property
    def _endpoints(self) -> Endpoints:
        return self._opened

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channels; calls in flight end with `Cancelled`. Idempotent.

        >>> other = InferenceClient("127.0.0.1:8001")
        >>> other.close()
        """
        self._closed = True
        self._closing.set()
        self._retry_queue.close()
        for connection in self._opened.close():
            connection.channel.close()
            connection.stream_channel.close()

    def submit(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: str = "",
        timeout: float | None = None,
        outputs: Outputs | None = None,
        request_id: str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        metadata: Headers = (),
        compression: Compression | None = None,
    ) -> InferenceFuture:
        """Send one request and return a `concurrent.futures.Future` of its result.

        Arguments are those of `infer`, but the request is always sent whole. Errors after the request was sent are raised by the future.
        `cancel()` of the future cancels the call on the server. The first request for a model
        waits for the model's metadata. Thread-safe.

        >>> futures = [client.submit("digits", {"image": np.zeros((1, 8, 8), np.uint8)}) for _ in range(3)]
        >>> [future.result()["probabilities"].shape for future in futures]
        [(1, 10), (1, 10), (1, 10)]
        """
        request = codec.request_of(inputs, request_id, outputs, parameters)
        context = self._settings.of_call(metadata, compression).begin(timeout, request.request_id)
        encoded = self._encode(model, version, context, request)
        attempts = self._attempts(encoded)
        return InferenceFuture(
            lambda: self._begin(
                attempts.next().stub.ModelInfer.future, encoded, **self._call_options(context)
            ),
            request.request_id,
            functools.partial(self._cache.refused, model, version),
            functools.partial(self._compared, encoded, context),
            attempts,
            context.deadline,
            self._retry_queue,
        )
