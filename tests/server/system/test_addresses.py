"""Listening sockets of the server."""

from __future__ import annotations

import asyncio
import socket

from tensorferry.server.system.addresses import listen_for_http


def test_asyncio_sends_the_parts_of_an_answer_at_once() -> None:
    """Otherwise the last part waits until the client acknowledges the one before, about 40 ms."""

    async def nodelay() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = listen_for_http("127.0.0.1", 0)
        server = await asyncio.start_server(connected, sock=listening)
        async with server:
            _, writer = await asyncio.open_connection(*listening.getsockname())
            found = await accepted
            writer.close()
            await writer.wait_closed()
        return found

    assert asyncio.run(nodelay())
