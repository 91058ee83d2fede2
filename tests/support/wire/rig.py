"""Answers and streams of tritonclient, for tests."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import tritonclient.grpc as triton
from polling import until
from tritonclient.utils import InferenceServerException

# Bound for waits that end at once unless something is broken.
PATIENCE = 30.0


class Answers:
    """Answers of calls, in order of arrival. `put` is a callback for tritonclient."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def put(self, result: Any, error: Any) -> None:
        self._queue.put((result, error))

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()

    def next(self) -> tuple[Any, Any]:
        return self._queue.get(timeout=PATIENCE)

    def result(self) -> Any:
        """Return the next answer, which must not be an error."""
        result, error = self.next()
        assert error is None, error
        return result

    def error(self) -> InferenceServerException:
        """Return the next answer, which must be an error."""
        result, error = self.next()
        assert result is None, result.get_response()
        assert isinstance(error, InferenceServerException)
        return error


class Stream(Answers):
    """An open stream of a client, closed at the end of a `with`, with its requests in flight."""

    def __init__(self, client: triton.InferenceServerClient, headers: dict[str, str] | None = None) -> None:
        super().__init__()
        self._client = client
        client.start_stream(self.put, headers=headers)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.stop_stream(cancel_requests=True)

    def send(self, model: str, inputs: Sequence[triton.InferInput], request_id: str, **options: Any) -> None:
        self._client.async_stream_infer(model, inputs, request_id=request_id, **options)


def until_known(client: triton.InferenceServerClient, model: str, given: triton.InferInput) -> None:
    """Wait until the server knows whether a model supports a tensor with an axis of length zero."""

    def status() -> object:
        try:
            client.infer(model, [given])
        except InferenceServerException as error:
            return error.status()
        return None

    until(status, lambda found: found != "StatusCode.UNAVAILABLE")
