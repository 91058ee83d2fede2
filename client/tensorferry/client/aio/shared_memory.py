"""Shared memory of the asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Generic, Self, overload

from tensorferry.client.aio.server_calls import ServerCalls
from tensorferry.client.connection.context import Headers
from tensorferry.client.connection.device_arrays import DeviceArray, DeviceResult
from tensorferry.client.errors import InferenceError, InvalidInput
from tensorferry.client.messages.metadata import ModelMetadata
from tensorferry.client.messages.results import InferenceResult, Parameter
from tensorferry.client.messages.shared_layout import Shapes
from tensorferry.client.shared_tensors import (
    RELEASE_POLL_SECONDS,
    RELEASE_SECONDS,
    ArrayT,
    ResultT,
    SharedTensors,
    shared_tensors,
)
from tensorferry.protos.tensors import Array


class SharedMemory(Generic[ArrayT, ResultT]):
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
        client: ServerCalls,
        model: str,
        version: str,
        timeout: float | None,
        make: Callable[[ModelMetadata], SharedTensors[ArrayT, ResultT]],
    ) -> None:
        targets = client._arguments["target"]
        if len(targets) > 1:
            # Requests could reach a server that does not know the region.
            change = "use a client of one server on this machine"
            raise InvalidInput("shared memory", "a client of one target", f"{len(targets)} targets", change)
        self._client = client
        self._model = model
        self._version = version
        self._timeout = timeout
        self._make = make
        self._tensors: SharedTensors[ArrayT, ResultT] | None = None

    async def __aenter__(self) -> Self:
        if self._tensors is not None:
            raise RuntimeError(
                "this shared memory exists already: call client.shared_memory(...) for each `with` statement"
            )
        context = self._client._settings.begin(self._timeout)
        metadata = await self._client._known(self._model, self._version, context)
        tensors = self._make(metadata)
        try:
            await self._client._run(tensors.register, context)
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
    def inputs(self) -> Mapping[str, ArrayT]:
        """Array of each input, with all rows, to be filled before `infer`. On a GPU it is a `DeviceArray`.

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
    ) -> ResultT:
        """Run the first `rows` rows of the inputs, all of them for None, and wait for the answer.

        The outputs are arrays over the shared memory: the next `infer` overwrites them. On a GPU the
        result is a `DeviceResult`. Other arguments and errors are those of `InferenceClient.infer`.

        >>> async with client.shared_memory("digits", rows=2) as memory:
        ...     (await memory.infer(timeout=1.0))["probabilities"].shape
        (2, 10)
        """
        context = self._client._settings.of_call(metadata).begin(timeout, request_id or "")
        tensors = self._entered()
        request = tensors.request(rows, request_id, parameters)
        try:
            answer = await self._client._call("ModelInfer", request, context)
        except InferenceError as error:
            self._client._cache.refused(self._model, self._version, error)
            raise
        return await self._client._compared(request, context, tensors.result(answer))

    def _entered(self) -> SharedTensors[ArrayT, ResultT]:
        if self._tensors is None:
            raise RuntimeError(
                "the shared memory exists only inside its `with` statement: write `async with client.shared_memory(...) as memory:`"
            )
        return self._tensors

    async def _release(self, tensors: SharedTensors[ArrayT, ResultT]) -> None:
        try:
            # The server may be gone, or the client closed.
            with contextlib.suppress(InferenceError):
                context = self._client._settings.begin(RELEASE_SECONDS)
                await self._client._run(tensors.unregister, context)
                while tensors.in_use is not None and await self._client._run(tensors.in_use, context):
                    await asyncio.sleep(RELEASE_POLL_SECONDS)
        finally:
            tensors.memory.close()


class SharedMemoryCalls(ServerCalls):
    """The method of the client that sets up shared memory."""

    @overload
    def shared_memory(
        self,
        model: str,
        rows: int,
        version: str = "",
        *,
        shapes: Shapes | None = None,
        device: None = None,
        timeout: float | None = None,
    ) -> SharedMemory[Array, InferenceResult]: ...

    @overload
    def shared_memory(
        self,
        model: str,
        rows: int,
        version: str = "",
        *,
        shapes: Shapes | None = None,
        device: int,
        timeout: float | None = None,
    ) -> SharedMemory[DeviceArray, DeviceResult]: ...

    def shared_memory(
        self,
        model: str,
        rows: int,
        version: str = "",
        *,
        shapes: Shapes | None = None,
        device: int | None = None,
        timeout: float | None = None,
    ) -> SharedMemory[Any, Any]:
        """Return memory for requests of up to `rows` rows, which a server of this machine shares.

        Use it with `async with`. `shapes` has the whole shapes of inputs and outputs with dynamic axes
        other than the rows. The server needs `--allow-shared-memory`, and must run as the same user.
        `timeout` is for creating it. Raises InvalidInput for a tensor of strings or of unknown size,
        and for a client of several targets, OSError without enough memory, and the server's error if
        it refuses the region.

        `device` is the number of an NVIDIA GPU, whose memory is then shared: see `DeviceArray`. It
        must have this number in both processes. Raises ImportError without the package cuda-bindings,
        InvalidInput for an unknown GPU, and OSError for a failed call of the NVIDIA driver.

        >>> async with client.shared_memory("digits", rows=32) as memory:
        ...     memory.inputs["image"][...] = np.zeros((32, 8, 8), np.uint8)
        ...     (await memory.infer())["probabilities"].shape
        (32, 10)
        """
        make = functools.partial(shared_tensors, version=version, rows=rows, shapes=shapes, device=device)
        return SharedMemory(self, model, version, timeout, make)
