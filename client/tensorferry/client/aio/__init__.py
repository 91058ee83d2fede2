"""Asyncio client with the methods of `tensorferry.client.InferenceClient`."""

from tensorferry.client.aio.client import InferenceClient
from tensorferry.client.aio.shared_memory import SharedMemory

__all__ = ["InferenceClient", "SharedMemory"]
