"""A sequence of requests to a model that keeps state between them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from types import TracebackType
from typing import Self

from tensorferry.client.aio import waits
from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages.codec import Inputs, Outputs, StreamRequest
from tensorferry.client.messages.results import InferenceResult, Parameter

# Ids of Triton's clients are of 64 bits with a sign, and 0 is none.
_MOST = 2**63 - 1


class InferenceSequence:
    """Requests of one sequence, one after the other, over a stream of their own. Made by `InferenceClient.sequence`.

    The server keeps the model's state from each request to the next, and frees it when the block is
    left. After an error the sequence is over. One task at a time may use it.
    """

    def __init__(
        self, stream: Callable[[AsyncGenerator[StreamRequest]], AsyncGenerator[InferenceResult]]
    ) -> None:
        self._requests: waits.Queue[StreamRequest | None] = waits.Queue()
        # Begins with the first request.
        self._results = stream(self._sent())
        self._begun = self._over = False
        # Not of `random`: two programs with the same seed would use the same ids.
        self.id = 1 + secrets.randbelow(_MOST)

    async def infer(
        self,
        inputs: Inputs,
        *,
        end: bool = False,
        outputs: Outputs | None = None,
        request_id: str = "",
        parameters: Mapping[str, Parameter] | None = None,
    ) -> InferenceResult:
        """Run the next request of the sequence and wait for its answer; with `end`, it is the last.

        Inputs have one row, and are as for `InferenceClient.infer`. Raises InvalidInput if the sequence is over.
        """
        if self._over:
            raise InvalidInput("the sequence", "one that goes on", "one that is over", "begin another one")
        of_sequence: dict[str, Parameter] = {"sequence_id": self.id, "sequence_end": end}
        of_sequence["sequence_start"] = not self._begun
        request = StreamRequest(inputs, request_id, outputs, {**(parameters or {}), **of_sequence})
        self._begun = self._over = True
        await self._requests.put(request)
        result = await anext(self._results)
        self._over = end
        return result

    async def _sent(self) -> AsyncGenerator[StreamRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        await self._requests.put(None)
        await self._results.aclose()
