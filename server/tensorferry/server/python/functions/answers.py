"""The answers of a function that yields: a generator, or an asynchronous one, read one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Final, Protocol

# What `Answers.read` returns after the last answer.
NO_MORE: Final = object()


class Answers(Protocol):
    """Answers of one run. One thread reads and closes them; `cancel` is thread-safe."""

    def read(self) -> Any:
        """Return the next answer; NO_MORE after the last one. Raises what the user's code raises."""

    def close(self) -> None:
        """Close the generator. Idempotent. Raises what the user's code raises."""

    def cancel(self) -> None:
        """Let a generator that waits end soon, because nobody reads its answers any more."""


def answers_of(returned: Any) -> Answers:
    """Return the answers of what a function returned. TypeError if that is no generator, nor another iterator."""
    if isinstance(returned, AsyncIterator):
        return _AsynchronousAnswers(returned)
    if isinstance(returned, Iterator):
        return _PlainAnswers(returned)
    raise TypeError(
        f"the function returned {type(returned).__name__}; it is declared with streams=True, so it must yield its answers"
    )


class _PlainAnswers:
    """Answers of a generator, which cannot be stopped while it computes: `cancel` does nothing."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source

    def read(self) -> Any:
        return next(self._source, NO_MORE)

    def close(self) -> None:
        close = getattr(self._source, "close", None)
        if close is not None:
            close()

    def cancel(self) -> None:
        pass


class _AsynchronousAnswers:
    """Answers of an asynchronous generator. It has an event loop of its own, which runs while an answer is awaited."""

    def __init__(self, source: AsyncIterator[Any]) -> None:
        self._source = source
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def read(self) -> Any:
        try:
            # In the context of this call, because another `ModelCaller` may serve it than the one before.
            return self._runner.run(self._read(), context=copy_context())
        except asyncio.CancelledError:
            if self._cancelled:
                return NO_MORE
            raise

    async def _read(self) -> Any:
        self._task = asyncio.current_task()
        return NO_MORE if self._cancelled else await anext(self._source, NO_MORE)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with self._runner:
            if isinstance(self._source, AsyncGenerator):
                self._runner.run(self._source.aclose(), context=copy_context())

    def cancel(self) -> None:
        self._cancelled = True
        # The loop may be closed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel_task)

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
