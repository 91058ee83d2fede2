"""Whose each call is, as the service hears of it."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from support.server.rig import PATIENCE
from support.server.scripted_service import Door

from tensorferry.server.identity import ANONYMOUS
from tensorferry.server.security.access_control import AccessControl, address_of


def test_without_access_every_call_is_anyones(door: Door) -> None:
    call = door.infer("1")
    stream = door.stream()
    stream.send("2")
    door.service.await_received(2)
    door.service.answer("1", "2")
    assert call.result(PATIENCE).id == "1"
    assert stream.read_ids(1) == ["2"]
    assert door.service.callers["1"] is door.service.callers["2"] is ANONYMOUS


def test_a_caller_is_known_by_its_address(open_door: Callable[..., Door]) -> None:
    door = open_door(access=AccessControl())
    call = door.infer("1")
    stream = door.stream()
    stream.send("2", "3")
    door.service.await_received(3)
    door.service.answer("1", "2", "3")
    assert call.result(PATIENCE).id == "1"
    assert stream.read_ids(2) == ["2", "3"]
    assert {caller.name for caller in door.service.callers.values()} == {"127.0.0.1"}


def test_over_a_socket_of_the_file_system_too(
    open_door: Callable[..., Door], tmp_path_factory: pytest.TempPathFactory
) -> None:
    address = f"unix:{tmp_path_factory.mktemp('s')}/s"

    def listen(server: grpc.Server) -> str:
        server.add_insecure_port(address)
        return address

    door = open_door(access=AccessControl(), listen=listen)
    call = door.infer("1")
    door.service.await_received(1)
    door.service.answer("1")
    assert call.result(PATIENCE).id == "1"
    assert door.service.callers["1"].name == "unix"


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:4711", "10.0.0.7"),
        ("ipv6:[::1]:4711", "::1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", "fe80::1%eth0"),
        ("unix:/run/a:1", "unix"),
        ("unix:", "unix"),
    ],
)
def test_an_address_has_no_port(peer: str, address: str) -> None:
    assert address_of(peer) == address
