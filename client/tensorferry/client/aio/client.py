"""The asyncio client: how it is opened and closed, and calls in the background."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from tensorferry.client.aio import waits
from tensorferry.client.aio.inference import InferenceCalls
from tensorferry.client.connection.context import Compression, Headers
from tensorferry.client.connection.endpoints import Endpoints
from tensorferry.client.messages.codec import Inputs, Outputs
from tensorferry.client.messages.results import InferenceResult, Parameter

T = TypeVar("T")


class InferenceClient(InferenceCalls):
    """A client of one server, or of several equal ones. Use it with `async with`, or await `close`.

    Arguments, retries, timeouts and errors are those of `tensorferry.client.InferenceClient`.

    Not thread-safe: a client belongs to the event loop of its first call. Any number of tasks of
    that loop may use it at once.

    >>> async with InferenceClient("127.0.0.1:8001") as client:
    ...     (await client.infer("digits", {"image": np.zeros((1, 8, 8), np.uint8)}))["probabilities"].shape
    (1, 10)
    """

    def _open(self, endpoints: Callable[[Any], Endpoints]) -> None:
        self._closing = waits.Closing()
        self._open_endpoints = endpoints
        # Opened by the first call, because channels of grpcio belong to a running event loop.
        self._opened: Endpoints | None = None
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def _endpoints(self) -> Endpoints:
        if self._opened is None:
            self._check_open()
            self._opened = self._open_endpoints(grpc.aio)
        return self._opened

    def _begin(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        begun = super()._begin(call, *arguments, **options)
        if isinstance(begun, grpc.aio.StreamStreamCall):
            self._streams.add(begun)
        return begun

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channels; calls in flight end with `Cancelled`. Idempotent.

        >>> other = InferenceClient("127.0.0.1:8001")
        >>> await other.close()
        """
        self._closed = True
        self._closing.set()
        # Some versions of grpcio, such as 1.81, do not end them with their channel.
        for call in list(self._streams):
            call.cancel()
        for connection in self._opened.close() if self._opened else ():
            await connection.channel.close()
            await connection.stream_channel.close()

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
    ) -> asyncio.Task[InferenceResult]:
        """Send one request and return an `asyncio.Task` of its result.

        Arguments are those of `infer`. The task raises every error. `cancel()` of the task
        cancels the call on the server.

        >>> tasks = [client.submit("digits", {"image": np.zeros((1, 8, 8), np.uint8)}) for _ in range(3)]
        >>> [result["probabilities"].shape for result in await asyncio.gather(*tasks)]
        [(1, 10), (1, 10), (1, 10)]
        """
        return asyncio.create_task(
            self.infer(
                model,
                inputs,
                version=version,
                timeout=timeout,
                outputs=outputs,
                request_id=request_id,
                parameters=parameters,
                metadata=metadata,
                compression=compression,
            )
        )
