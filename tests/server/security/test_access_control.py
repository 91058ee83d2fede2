"""Tokens and roles over both transports, and changes of the file."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.server.rig import PATIENCE, Make, fp32, request
from support.server.scripted_service import ServedTransport
from support.server.tokens import (
    DENIED,
    EVERY,
    METHODS,
    OK,
    REFLECTION,
    TOKENS,
    UNAUTHENTICATED,
    bearer,
    line,
    outcome,
)

from tensorferry.server.app import App
from tensorferry.server.errors import StartError
from tensorferry.server.security.access_control import AccessControl, ClientCertificate
from tensorferry.server.security.method_roles import REQUIRED_ROLES, required_role

pytestmark = pytest.mark.usefixtures("reload_on_every_call")

EXEMPT = {"ServerLive", "ServerReady", "Check", "Watch"}


@pytest.fixture
def app(start: Make, tokens: Path) -> App:
    # The check takes longer than most tests.
    return start(auth_tokens=tokens, batching="trust")


@pytest.fixture
def channel(app: App) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(app.address) as channel:
        yield channel


def opened(tokens: Path) -> AccessControl:
    access = AccessControl(tokens=tokens)
    access.open()
    return access


class TestEveryMethod:
    def test_every_method_has_a_role(self) -> None:
        """A new method of the protocol must be given a role."""
        assert set(REQUIRED_ROLES) == set(METHODS)

    def test_an_unknown_method_requires_the_control_role(self) -> None:
        assert required_role("/another.Service/Method") == "control"

    def test_calls_without_a_token_or_with_a_wrong_one_are_refused(self, channel: grpc.Channel) -> None:
        for name, method in EVERY.items():
            for metadata in ((), bearer("wrong-secret")):
                code, message = outcome(channel, method, metadata)
                assert (code is UNAUTHENTICATED) == (name not in EXEMPT), name
                assert "wrong-secret" not in message

    @pytest.mark.parametrize("roles", TOKENS)
    def test_a_method_requires_its_role(self, channel: grpc.Channel, roles: str) -> None:
        for name, method in EVERY.items():
            wanted = REQUIRED_ROLES.get(name, "infer")
            code, message = outcome(channel, method, bearer(TOKENS[roles]))
            if wanted in roles.split(",") or name in EXEMPT:
                assert code not in (UNAUTHENTICATED, DENIED), (name, message)
            else:
                assert code is DENIED, name
                assert repr(wanted) in message

    def test_reflection_can_be_switched_off(self, start: Make) -> None:
        app = start(reflection=False)
        with grpc.insecure_channel(app.address) as channel:
            (method,) = REFLECTION.values()
            assert outcome(channel, method)[0] is grpc.StatusCode.UNIMPLEMENTED

    def test_calls_that_change_state_are_logged_with_the_client(
        self, channel: grpc.Channel, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        outcome(channel, METHODS["RepositoryModelUnload"], bearer(TOKENS["control"]))
        assert "RepositoryModelUnload is called by of-1" in caplog.messages


class TestTokens:
    def infer(self, channel: grpc.Channel, *headers: str) -> grpc.StatusCode:
        data = request({"x": fp32(1, 3)}).SerializeToString()
        metadata = tuple(("authorization", header) for header in headers)
        return outcome(channel, METHODS["ModelInfer"], metadata, data)[0]

    @pytest.mark.parametrize("scheme", ["bearer", "BEARER"])
    def test_the_scheme_is_case_insensitive(self, channel: grpc.Channel, scheme: str) -> None:
        for _ in range(2):
            assert self.infer(channel, f"{scheme} {TOKENS['infer']}") is OK

    @pytest.mark.parametrize(
        "header",
        [
            "Bearer ",
            TOKENS["infer"],
            f"Basic {TOKENS['infer']}",
            f"Bearer {hashlib.sha256(TOKENS['infer'].encode()).hexdigest()}",
        ],
    )
    def test_other_headers_are_refused(self, channel: grpc.Channel, header: str) -> None:
        assert self.infer(channel, header) is UNAUTHENTICATED
        # Only the first header is used.
        assert self.infer(channel, header, f"Bearer {TOKENS['infer']}") is UNAUTHENTICATED

    def test_a_removed_token_is_refused_even_if_it_was_just_used(
        self, channel: grpc.Channel, tokens: Path
    ) -> None:
        header = f"Bearer {TOKENS['infer']}"
        assert self.infer(channel, header) is OK
        tokens.write_text(line("other", "infer", "other-secret"))
        assert self.infer(channel, header) is UNAUTHENTICATED
        assert self.infer(channel, "Bearer other-secret") is OK


def test_a_refused_call_leaves_nothing_behind(serve: Callable[..., ServedTransport], tokens: Path) -> None:
    """The message is not read. The fixture checks that no call is left."""
    served = serve(access=opened(tokens), options=[("grpc.max_receive_message_length", -1)])
    large = bytes(8 << 20)
    for number in range(5):
        assert (
            outcome(served.channel, METHODS["ModelInfer"], bearer(f"{number}"), large)[0] is UNAUTHENTICATED
        )
        stream = served.stream(metadata=bearer(f"{number}"))
        stream.send_bytes(large)
        error: Any = stream.end()
        assert error.code() is UNAUTHENTICATED
    assert not served.service.received
    call = served.infer("1", metadata=bearer(TOKENS["infer"]))
    served.service.await_received(1)
    served.service.answer("1")
    assert call.result(PATIENCE).id == "1"


class TestStreams:
    def test_requests_sent_before_the_token_is_removed_are_answered(
        self, serve: Callable[..., ServedTransport], tokens: Path
    ) -> None:
        served = serve(access=opened(tokens))
        stream = served.stream(metadata=bearer(TOKENS["infer"]))
        stream.send("1", "2")
        served.service.await_received(2)
        tokens.write_text(line("other", "infer", "other-secret"))
        stream.send("3")
        served.service.answer("1", "2")
        assert stream.read_ids(2) == ["1", "2"]
        error: Any = stream.end()
        assert error.code() is UNAUTHENTICATED
        assert served.service.received == ["1", "2"]

    def test_a_stream_continues_with_the_changed_identity(
        self, serve: Callable[..., ServedTransport], tokens: Path
    ) -> None:
        served = serve(access=opened(tokens))
        stream = served.stream(metadata=bearer(TOKENS["infer"]))
        stream.send("1")
        served.service.await_received(1)
        tokens.write_text(line("renamed", "infer", TOKENS["infer"]))
        stream.send("2")
        served.service.await_received(2)
        served.service.answer("1", "2")
        assert stream.read_ids(2) == ["1", "2"]
        assert [served.service.callers[number].name for number in ("1", "2")] == ["of-0", "renamed"]


class TestTheFile:
    @pytest.mark.parametrize(
        ("text", "wrong"),
        [
            ("alice infer", "line 1 has 2 of the three fields"),
            ("alice infer secret-of-alice", "line 1: the third field for alice must be sha256:"),
            (f"\n# x\nalice infer sha256:{'g' * 64}", "line 3: the third field for alice must be"),
            (f"alice infer,admin sha256:{'0' * 64}", "unknown roles for alice; the roles are control and infer"),
            (f"sha256:{'0' * 64} infer alice", "line 1 does not begin with a name"),
            (f"a infer sha256:{'0' * 64}\nb infer sha256:{'0' * 64}", "line 2 repeats for b the credential of a"),
        ],
    )  # fmt: skip
    def test_errors_name_the_line_and_no_secret(self, tmp_path: Path, text: str, wrong: str) -> None:
        path = tmp_path / "tokens"
        path.write_text(text)
        with pytest.raises(StartError, match=wrong) as caught:
            AccessControl(tokens=path).open()
        assert str(path) in str(caught.value)
        for secret in ("secret-of-alice", "0" * 64, "g" * 64):
            assert secret not in str(caught.value)

    def test_a_file_without_entries_is_logged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = tmp_path / "tokens"
        path.write_text("\n# NAME ROLES TOKEN\n\n")
        AccessControl(tokens=path).open()
        assert f"{path} has no entries" in caplog.text

    @pytest.mark.parametrize(
        ("bad", "flag"), [("auth", "--auth-tokens"), ("auth-of-certs", "--auth-certificates")]
    )
    def test_the_option_of_a_bad_file_is_named(self, tmp_path: Path, bad: str, flag: str) -> None:
        """Also if the path of one file begins with that of the other."""
        tokens, certificates = tmp_path / "auth", tmp_path / "auth-of-certs"
        for path in (tokens, certificates):
            path.write_text("")
        (tmp_path / bad).write_bytes(b"\xff")
        with pytest.raises(StartError) as caught:
            AccessControl(tokens=tokens, certificates=certificates).open()
        assert str(caught.value).startswith(f"{flag}: {tmp_path / bad}")

    def test_headers_with_many_blanks_are_not_cached(self, tmp_path: Path) -> None:
        path = tmp_path / "tokens"
        path.write_text(line("alice", "infer", "a"))
        access = opened(path)
        for header in ("Bearer a", f"Bearer {' ' * 1000}a"):
            caller = access.admit(
                "infer", (("authorization", header),), str, lambda: ClientCertificate(None, ())
            )
            assert caller.name == "alice"
        assert list(access._credentials.headers) == ["Bearer a"]
