"""Foreign clients of gRPC against a server with TLS, client certificates and tokens."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.wire.inputs import tensor
from tritonclient.utils import InferenceServerException
from wire.conftest import Secured
from wire.test_grpcurl import GRPCURL, needs_grpcurl

HEADER = {"authorization": "Bearer the-token-to-infer"}


def test_tritonclient(secured: Secured) -> None:
    certificate, key = map(str, secured.files.client)
    given = [tensor("x", np.zeros((1, 3), np.float32), "FP32")]
    trusted = {"ssl": True, "root_certificates": str(secured.files.ca)}
    with triton.InferenceServerClient(
        secured.server.address, **trusted, private_key=key, certificate_chain=certificate
    ) as client:
        assert client.is_server_live()
        assert client.infer("echo", given, headers=HEADER).as_numpy("y") is not None
        assert client.get_model_metadata("echo", headers=HEADER).name == "echo"
        for headers in (None, {"authorization": "Bearer another"}):
            with pytest.raises(InferenceServerException, match="needs a token") as caught:
                client.infer("echo", given, headers=headers)
            assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
        with pytest.raises(InferenceServerException, match="requires the role 'control'"):
            client.unload_model("echo", headers=HEADER)
    with (
        triton.InferenceServerClient(secured.server.address, **trusted) as client,
        pytest.raises(InferenceServerException, match="UNAVAILABLE"),
    ):
        client.is_server_live()


@needs_grpcurl
def test_grpcurl(secured: Secured) -> None:
    certificate, key = map(str, secured.files.client)

    def grpcurl(
        *arguments: str, headers: tuple[str, ...] = ("-H", f"authorization: {HEADER['authorization']}")
    ) -> str:
        files = ("-cacert", str(secured.files.ca), "-cert", certificate, "-key", key)
        command = [str(GRPCURL), "-max-time", "30", *files, *headers, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    address, service = secured.server.address, "inference.GRPCInferenceService"
    assert service in grpcurl(address, "list")
    assert "Unauthenticated" in grpcurl(address, "list", headers=())
    answer = json.loads(grpcurl("-d", '{"name": "echo"}', address, f"{service}/ModelMetadata"))
    assert answer["name"] == "echo"
    unload = ("-d", '{"model_name": "echo"}', address, f"{service}/RepositoryModelUnload")
    assert "PermissionDenied" in grpcurl(*unload)
