"""Calls of either client, written once for both."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Generator
from concurrent.futures import Future
from typing import Any

from tensorferry.client import InferenceClient, aio

Client = InferenceClient | aio.InferenceClient
KINDS: list[type[Any]] = [InferenceClient, aio.InferenceClient]
IDS = ["threads", "asyncio"]


async def call(client: Client, method: str, *arguments: Any, **options: Any) -> Any:
    """Call a method, wait for a future or a task, and collect a stream."""
    result = getattr(client, method)(*arguments, **options)
    if inspect.isasyncgen(result):
        return [one async for one in result]
    if inspect.isawaitable(result):
        return await result
    if isinstance(result, Future):
        return result.result(30)
    return list(result) if isinstance(result, Generator) else result


async def close(client: Client) -> None:
    """Close the client."""
    if isinstance(client, InferenceClient):
        client.close()
    else:
        await client.close()


@contextlib.asynccontextmanager
async def shared(client: Client, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
    """Enter the shared memory of either client."""
    memory: Any = client.shared_memory(*arguments, **options)
    if isinstance(client, InferenceClient):
        with memory:
            yield memory
    else:
        async with memory:
            yield memory
