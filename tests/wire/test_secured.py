"""Foreign clients against a server with TLS, client certificates and tokens."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.processes.server import ServerProcess, running
from support.server.certificates import Issued
from support.wire.inputs import tensor
from tritonclient.utils import InferenceServerException

GRPCURL = shutil.which("grpcurl", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")

TOKEN = "a-token-of-the-tests"
HEADER = {"authorization": f"Bearer {TOKEN}"}


@dataclass(frozen=True)
class Secured:
    server: ServerProcess
    ca: Path
    certificate: Path
    key: Path


@pytest.fixture(scope="module")
def secured(
    transport: str, digits_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    issued = Issued.in_folder(folder)
    tokens = folder / "tokens"
    tokens.write_text(f"tests infer sha256:{hashlib.sha256(TOKEN.encode()).hexdigest()}\n")
    with running(
        *(f"digits={digits_model}", *issued.flags, "--auth-tokens", tokens),
        transport=transport,
    ) as server:
        yield Secured(server, issued.ca, *issued.client)


def image() -> triton.InferInput:
    return tensor("image", np.zeros((1, 8, 8), np.uint8), "UINT8")


def test_tritonclient(secured: Secured) -> None:
    with triton.InferenceServerClient(
        secured.server.address,
        ssl=True,
        root_certificates=str(secured.ca),
        private_key=str(secured.key),
        certificate_chain=str(secured.certificate),
    ) as client:
        assert client.is_server_live()
        assert client.infer("digits", [image()], headers=HEADER).as_numpy("label") is not None
        assert client.get_model_metadata("digits", headers=HEADER).name == "digits"
        for headers in (None, {"authorization": "Bearer another"}):
            with pytest.raises(InferenceServerException, match="needs a token") as caught:
                client.infer("digits", [image()], headers=headers)
            assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
        with pytest.raises(InferenceServerException, match="requires the role 'control'"):
            client.unload_model("digits", headers=HEADER)


def test_tritonclient_without_a_certificate(secured: Secured) -> None:
    with (
        triton.InferenceServerClient(
            secured.server.address, ssl=True, root_certificates=str(secured.ca)
        ) as client,
        pytest.raises(InferenceServerException, match="UNAVAILABLE"),
    ):
        client.is_server_live()


def test_grpcurl(secured: Secured) -> None:
    # Without Go, as on a developer's machine, this test is skipped; CI must run it.
    if GRPCURL is None and not os.environ.get("CI"):
        pytest.skip("grpcurl is not installed: make tools installs it")

    def grpcurl(*arguments: str, header: str | None = f"authorization: Bearer {TOKEN}") -> str:
        files = ["-cacert", str(secured.ca), "-cert", str(secured.certificate), "-key", str(secured.key)]
        headers = [] if header is None else ["-H", header]
        done = subprocess.run(
            [str(GRPCURL), "-max-time", "30", *files, *headers, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout + done.stderr

    address = secured.server.address
    assert "inference.GRPCInferenceService" in grpcurl(address, "list")
    assert "Unauthenticated" in grpcurl(address, "list", header=None)
    answer = json.loads(
        grpcurl("-d", '{"name": "digits"}', address, "inference.GRPCInferenceService/ModelMetadata")
    )
    assert answer["name"] == "digits"
    assert "PermissionDenied" in grpcurl(
        "-d", '{"model_name": "digits"}', address, "inference.GRPCInferenceService/RepositoryModelUnload"
    )
