"""Shared memory of the asyncio client."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tensorferry.client.aio_server_calls import AsyncServerCalls
from tensorferry.client.connection.context import Headers
from tensorferry.client.errors import InferenceError
from tensorferry.client.messages.codec import InferenceResult, Parameter
from tensorferry.client.messages.shared_layout import Shapes
from tensorferry.client.shared_tensors import RELEASE_SECONDS, SharedTensors, check_one_target
from tensorferry.protos.tensors import Array


class SharedMemory:
    """Inputs and outputs of one model in memory that a server of this machine shares.

    `InferenceClient.shared_memory` returns it. The `async with` statement creates the memory and registers
    it; its end unregisters it, and removes it. One task at a time may use it.

    >>> async with client.shared_memory("digits", rows=32) as memory:
    ...     memory.inputs["image"][:5] = 0
    ...     (await memory.infer(rows=5))["probabilities"].shape
    (5, 10)
    """

    def __init__(
        self,
        client: AsyncServerCalls,
        model: str,
        rows: int,
        version: str,
        shapes: Shapes | None,
        timeout: float | None,
    ) -> None:
        check_one_target(client._arguments["target"])
        self._client = client
        self._model = model
        self._version = version
        self._rows = rows
        self._shapes = shapes
        self._timeout = timeout
        self._tensors: SharedTensors | None = None

    async def __aenter__(self) -> Self:
        context = self._client._settings.begin(self._timeout)
        metadata = await self._client._known(self._model, self._version, context)
        tensors = SharedTensors(metadata, self._version, self._rows, self._shapes)
        try:
            await self._client._run(tensors.register(), context)
        except BaseException:
            await self._release(tensors)
            raise
        self._tensors = tensors
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tensors, self._tensors = self._entered(), None
        await self._release(tensors)

    @property
    def inputs(self) -> Mapping[str, Array]:
        """Array of each input, with all rows, to be filled before `infer`.

        >>> async with client.shared_memory("digits", rows=32) as memory:
        ...     memory.inputs["image"].shape
        (32, 8, 8)
        """
        return self._entered().inputs

    async def infer(
        self,
        rows: int | None = None,
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        metadata: Headers = (),
    ) -> InferenceResult:
        """Run the first `rows` rows of the inputs, all of them for None, and wait for the answer.

        The outputs are arrays over the shared memory: the next `infer` overwrites them. Other
        arguments and errors are those of `InferenceClient.infer`.

        >>> async with client.shared_memory("digits", rows=2) as memory:
        ...     (await memory.infer(timeout=1.0))["probabilities"].shape
        (2, 10)
        """
        context = self._client._settings.of_call(metadata).begin(timeout, request_id or "")
        return await self._client._run(self._entered().infer(rows, request_id, parameters), context)

    def _entered(self) -> SharedTensors:
        if self._tensors is None:
            raise RuntimeError(
                "the shared memory exists only inside its `with` statement: write `async with client.shared_memory(...) as memory:`"
            )
        return self._tensors

    async def _release(self, tensors: SharedTensors) -> None:
        try:
            # The server may be gone, or the client closed.
            with contextlib.suppress(InferenceError):
                await self._client._run(tensors.unregister(), self._client._settings.begin(RELEASE_SECONDS))
        finally:
            tensors.unlink()
