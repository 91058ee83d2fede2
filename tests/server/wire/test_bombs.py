"""Bombs are refused without being parsed."""

from __future__ import annotations

import gzip
from typing import Any

import grpc
import pytest
from fuzz.attackers.bombs import bombs, field
from fuzz.attackers.raw import Connection, framed, headers_of
from support.server.rig import PATIENCE, Make
from support.server.tokens import EVERY, outcome

from tensorferry.server.inference.requests import unmatched_request
from tensorferry.server.wire import bounds, receiving

# One for each method, of more than the most fields of a message. It may have more integers.
BOMBS = {bomb.method: bomb for bomb in bombs(200_000) if bomb.name != "packed int64_contents"}.values()
LARGE = b"\x68\x01" * bounds.MAX_MESSAGE_BYTES
INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]


@pytest.fixture
def parsed_kinds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types of the messages that are parsed."""
    kinds: list[str] = []
    parse = receiving.parse

    def counted(data: bytes, kind: Any) -> Any:
        kinds.append(kind.DESCRIPTOR.name)
        return parse(data, kind)

    monkeypatch.setattr(receiving, "parse", counted)
    monkeypatch.setattr(unmatched_request, "parse", counted)
    return kinds


def answer_of(address: str, method: str, data: bytes, *, packed: bool) -> Any:
    with Connection(address, PATIENCE) as connection:
        headers = headers_of(path=EVERY[method], grpc_encoding="gzip" if packed else None)
        call = connection.begin(headers)
        connection.send_all(call, framed(gzip.compress(data) if packed else data, flag=int(packed)))
        connection.await_answers([call])
        return connection.answers[call]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_bombs_are_refused_and_not_parsed(start: Make, parsed_kinds: list[str], packed: bool) -> None:
    app = start()
    for bomb in BOMBS:
        answer = answer_of(app.address, bomb.method, bomb.data, packed=packed)
        if bomb.method == "ModelStreamInfer":
            assert (answer.grpc_status, len(answer.messages)) == (0, 1), bomb.name
            assert b"INVALID_ARGUMENT" in answer.messages[0], bomb.name
        else:
            assert answer.grpc_status == INVALID, (bomb.method, bomb.name, answer)
            assert "this server takes" in answer.message or "is not a" in answer.message
            assert len(answer.message) < 500
    assert not parsed_kinds
    # A harmless message is parsed.
    assert answer_of(app.address, "ModelReady", field(1, b"m"), packed=packed).grpc_status == 0
    assert parsed_kinds == ["ModelReadyRequest"]


def test_other_methods_take_small_messages_only(start: Make, parsed_kinds: list[str]) -> None:
    app = start()
    with grpc.insecure_channel(app.address) as channel:
        for method in EVERY:
            if method in ("ModelInfer", "ModelStreamInfer"):
                continue
            code, message = outcome(channel, EVERY[method], data=LARGE)
            if method == "RepositoryModelLoad":
                # A load may contain a model's files.
                assert (code, "fields" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)
            else:
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, method
                assert (
                    message == f"the message has {len(LARGE)} bytes; this method takes at most 1048576 bytes"
                )
    assert not parsed_kinds
