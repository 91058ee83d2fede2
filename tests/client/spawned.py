"""What processes of multiprocessing run."""

from __future__ import annotations

import asyncio
from typing import Any

from tensorferry.client import InferenceClient, aio


def infer(client: InferenceClient, value: int) -> list[int]:
    with client:
        result: list[int] = client.infer("row", {"x": [value]}, timeout=30)["x"].tolist()
        return result


def infer_async(client: aio.InferenceClient, value: int) -> list[int]:
    async def run() -> Any:
        async with client:
            return (await client.infer("row", {"x": [value]}, timeout=30))["x"].tolist()

    result: list[int] = asyncio.run(run())
    return result
