"""Listening sockets of the server."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tensorferry.server.errors import StartError
from tensorferry.server.system.addresses import listen_for_http, listen_for_metrics


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


@pytest.mark.parametrize("host", ["127..0.1", "x" * 64])
def test_a_name_that_no_host_has_is_an_error_of_the_operator(host: str) -> None:
    with pytest.raises(
        StartError, match=f"cannot serve metrics on {host} port 0: .*; choose others by --metrics-host"
    ):
        listen_for_metrics(host, 0)
