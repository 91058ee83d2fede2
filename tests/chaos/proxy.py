"""A small TCP proxy with network faults: delay, throttling, silence, resets, and half-closed
connections.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

_CHUNK = 16 << 10


@dataclass(frozen=True, slots=True)
class Weather:
    """Present faults: delay of each chunk in seconds, bytes per second (0: no limit), and whether
    nothing passes.
    """

    delay: float = 0.0
    rate: float = 0.0
    silent: bool = False


FAIR = Weather()


class FaultProxy:
    """Listens on its own port for a server; `weather` may be set at any time, from any thread."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.weather = FAIR
        self.port = 0
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()
        if not self._ready.wait(30):
            raise RuntimeError("the fault proxy does not listen")

    def cut(self) -> None:
        """Reset every connection."""
        self._loop.call_soon_threadsafe(self._on_all, self._abort)

    def half_close(self) -> None:
        """Close every connection towards the client; what clients send still passes."""
        self._loop.call_soon_threadsafe(self._on_all, self._half)

    def close(self) -> None:
        """Close all connections and the port."""
        self._loop.call_soon_threadsafe(self._on_all, self._abort)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _on_all(self, what: Any) -> None:
        for pair in list(self._pairs):
            what(*pair)

    @staticmethod
    def _abort(*writers: asyncio.StreamWriter) -> None:
        for writer in writers:
            writer.transport.abort()

    @staticmethod
    def _half(to_client: asyncio.StreamWriter, to_server: asyncio.StreamWriter) -> None:
        if to_client.can_write_eof() and not to_client.is_closing():
            to_client.write_eof()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            to_client.transport.abort()
            return
        pair = (to_client, to_server)
        self._pairs.add(pair)
        try:
            await asyncio.gather(self._pump(reader, to_server), self._pump(from_server, to_client))
        finally:
            self._pairs.discard(pair)
            self._abort(*pair)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(_CHUNK):
                while self.weather.silent:
                    await asyncio.sleep(0.02)
                weather = self.weather
                if seconds := weather.delay + (len(data) / weather.rate if weather.rate else 0.0):
                    await asyncio.sleep(seconds)
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
        except (OSError, RuntimeError):
            writer.transport.abort()
