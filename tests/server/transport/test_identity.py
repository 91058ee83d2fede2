"""The client identity of a call, as the service gets it."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from support.server.rig import PATIENCE
from support.server.scripted_service import ServedTransport

from tensorferry.server.security.access_control import AccessControl, address_of


def test_a_client_is_identified_by_its_address(serve: Callable[..., ServedTransport]) -> None:
    served = serve(access=AccessControl())
    call = served.infer("1")
    stream = served.stream()
    stream.send("2", "3")
    served.service.await_received(3)
    served.service.answer("1", "2", "3")
    assert call.result(PATIENCE).id == "1"
    assert stream.read_ids(2) == ["2", "3"]
    assert {caller.name for caller in served.service.callers.values()} == {"127.0.0.1"}


def test_a_client_of_a_unix_socket_is_identified_as_unix(
    serve: Callable[..., ServedTransport], tmp_path_factory: pytest.TempPathFactory
) -> None:
    address = f"unix:{tmp_path_factory.mktemp('s')}/s"

    def listen(server: grpc.Server) -> str:
        server.add_insecure_port(address)
        return address

    served = serve(access=AccessControl(), listen=listen)
    call = served.infer("1")
    served.service.await_received(1)
    served.service.answer("1")
    assert call.result(PATIENCE).id == "1"
    assert served.service.callers["1"].name == "unix"


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:4711", "10.0.0.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", "fe80::1%eth0"),
        ("unix:/run/a:1", "unix"),
    ],
)
def test_an_address_has_no_port(peer: str, address: str) -> None:
    assert address_of(peer) == address
