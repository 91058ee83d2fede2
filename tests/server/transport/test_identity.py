"""The client identity of a call, as the service gets it."""

from __future__ import annotations

from collections.abc import Callable

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
