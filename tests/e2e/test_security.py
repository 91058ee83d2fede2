"""A real server with TLS and tokens: what its clients see, and that no secret is ever shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from polling import until
from support.processes.server import ServerProcess, run_command
from support.server.certificates import Issued

from tensorferry.client import InferenceClient, Tls, Unauthenticated
from tensorferry.client.cli import commands
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc


@dataclass(frozen=True)
class Secured:
    """A server that requires a client certificate and a token."""

    server: ServerProcess
    tls: Tls
    tokens: Path
    user: str
    operator: str

    def client(self, token: str | None) -> InferenceClient:
        return InferenceClient(self.server.address, tls=self.tls, token=token)


def token(path: Path, *arguments: str) -> str:
    """Run `tensorferry token`, and add the result to the file."""
    return run_command("token", *arguments, "--file", path).stdout.strip()


def start(transport: str, folder: Path, model: Path) -> Secured:
    issued = Issued.in_folder(folder)
    tokens = folder / "tokens"
    user, operator = token(tokens, "user"), token(tokens, "operator", "--roles", "infer,control")
    server = ServerProcess.start(
        *(f"digits={model}", "--metrics-port", "0", "--log-level", "debug"),
        *(*issued.flags, "--auth-tokens", tokens),
        transport=transport,
    )
    return Secured(server, Tls(issued.ca, *issued.client), tokens, user, operator)


@pytest.fixture(scope="module")
def secured(
    transport: str, tmp_path_factory: pytest.TempPathFactory, digits_model: Path
) -> Iterator[Secured]:
    secured = start(transport, tmp_path_factory.mktemp("secured"), digits_model)
    yield secured
    assert secured.server.stop() == 0
    assert not secured.server.errors()


IMAGE = {"image": np.zeros((1, 8, 8), np.uint8)}


def test_the_bundled_clients(secured: Secured) -> None:
    with secured.client(secured.user) as client:
        assert client.infer("digits", IMAGE)
        assert len(list(client.stream("digits", [IMAGE] * 20))) == 20
    for wrong in (None, "wrong"):
        with secured.client(wrong) as client:
            assert client.is_ready()
            with pytest.raises(Unauthenticated, match="needs a token that this server accepts"):
                client.metadata("digits")


def test_the_commands(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = secured.tls
    arguments = ["--target", secured.server.address, "--ca-file", str(tls.ca_file)]
    arguments += ["--cert-file", str(tls.cert_file), "--key-file", str(tls.key_file)]
    assert commands.models(arguments) == 1
    monkeypatch.setenv("TENSORFERRY_TOKEN", secured.user)
    assert commands.models(arguments) == 0


def test_no_secret_is_shown_anywhere(secured: Secured) -> None:
    """Not in the debug log, the metrics, the errors, the traces, the help or the process list.

    It is the last test of the server, which it stops.
    """
    with secured.client(secured.operator) as client:
        assert client.server_metadata()
    shown = []
    for wrong in (f"{secured.user}x", "guess-of-a-secret"):
        with secured.client(wrong) as client, pytest.raises(Unauthenticated) as caught:
            client.server_metadata()
        shown.append(str(caught.value))
    with grpc.secure_channel(secured.server.address, secured.tls.credentials()) as channel:
        stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as denied:
            stub.LogSettings(pb.LogSettingsRequest(), metadata=[("authorization", f"Bearer {secured.user}")])
        shown.append(str(denied.value))
    # The error of a file is reported, and its content is not.
    secured.tokens.write_text(f"user infer {secured.user}\n")
    with secured.client(secured.operator) as client:
        until(
            lambda: (
                client.server_metadata()
                and any("the previous credentials stay in force" in line for line in secured.server.log)
            )
        )
    shown.append(secured.server.page())
    shown += [Path(f"/proc/{pid}/cmdline").read_text() for pid in secured.server.processes()]
    assert secured.server.stop() == 0
    shown += secured.server.log
    for arguments in (("infer", "--help"), ("serve", "--auth-tokens")):
        done = run_command(*arguments, variables={"TENSORFERRY_TOKEN": secured.user})
        shown += [done.stdout, done.stderr]
    key = (secured.tokens.parent / "server.key").read_text().splitlines()[1]
    for secret in (secured.user, secured.operator, "guess-of-a-secret", key):
        assert not any(secret in text for text in shown)
    assert any("calls refused without a valid token or certificate" in line for line in secured.server.log)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ("--tls-certificate", "none.crt", "--tls-key", "none.key"),
            1,
            "--tls-certificate: none.crt is not a file",
        ),
        (("--auth-tokens", "none", "--host", "0.0.0.0"), 2, "can read the tokens"),
    ],
)
def test_one_that_cannot_be_secured_does_not_start(
    digits_model: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = run_command("serve", digits_model, "--port", "0", *arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
