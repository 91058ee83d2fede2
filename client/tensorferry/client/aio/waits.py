"""Waits of the asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc

from tensorferry.client import errors
from tensorferry.client.errors import DeadlineExceeded, InferenceError, Unavailable


class Closing:
    """Event that ends every wait before a retry."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """End all waits."""
        self._event.set()

    async def wait(self, seconds: float) -> bool:
        """Wait for the event, at most `seconds`; return whether it is set."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        return self._event.is_set()


# Hands requests to the task that sends them.
Queue = asyncio.Queue


def caller_cancelled() -> bool:
    """Return whether the caller cancelled the task; if not, grpcio raised CancelledError for a closed call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def one_is_ready(
    methods: Iterable[Callable[..., Any]], request: object, options: Mapping[str, Any]
) -> bool:
    """Ask all servers at once; return whether one is ready, as soon as one says so, and cancel the other calls.

    Errors other than Unavailable and DeadlineExceeded are raised at once.
    """

    async def outcome(call: Any) -> Any:
        # An exception of a task is logged if nothing reads it, so errors are returned.
        try:
            return await call
        except grpc.RpcError as error:
            return errors.from_rpc(error)
        except asyncio.CancelledError:
            if caller_cancelled():
                raise
            return errors.closed_during_call()

    calls = [method(request, wait_for_ready=True, **options) for method in methods]
    waiting = {asyncio.create_task(outcome(call)) for call in calls}
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for found in (task.result() for task in done):
                if not isinstance(found, InferenceError):
                    if found.ready:
                        return True
                elif not isinstance(found, (Unavailable, DeadlineExceeded)):
                    raise found
    finally:
        for task in waiting:
            task.cancel()
    return False
