"""Clients of HTTP against a server with TLS, client certificates, tokens and roles."""

from __future__ import annotations

import json
import ssl
import subprocess

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from geventhttpclient.response import HTTPConnectionClosed
from support.wire.http_inputs import refusal, tensor
from support.wire.programs import CURL, needs
from tritonclient.utils import InferenceServerException
from wire.conftest import Secured

INFER, CONTROL = ({"Authorization": f"Bearer the-token-to-{role}"} for role in ("infer", "control"))
X = np.ones((1, 3), np.float32)


def address_of(secured: Secured) -> str:
    return str(secured.server.ready["http"]).removeprefix("https://")


def test_tritonclient(secured: Secured) -> None:
    certificate, key = map(str, secured.files.client)
    trusted = {"ca_certs": str(secured.files.ca)}
    with triton.InferenceServerClient(
        address_of(secured), ssl=True, ssl_options={**trusted, "certfile": certificate, "keyfile": key}
    ) as client:
        assert client.is_server_live()
        given = tensor("x", X, "FP32")
        np.testing.assert_array_equal(client.infer("echo", [given], headers={**INFER}).as_numpy("y"), X)
        for method, headers, status in (
            (client.infer, None, "401"),
            (client.infer, {"Authorization": "Bearer another"}, "401"),
            (client.infer, {**CONTROL}, "403"),
        ):
            with pytest.raises(InferenceServerException) as caught:
                method("echo", [given], headers=headers)
            assert caught.value.status() == status
        with pytest.raises(InferenceServerException, match="requires the role 'control'"):
            client.unload_model("echo", headers={**INFER})
    # The server closes a connection without a certificate.
    with (
        triton.InferenceServerClient(address_of(secured), ssl=True, ssl_options=trusted) as client,
        pytest.raises((OSError, HTTPConnectionClosed)),
    ):
        client.is_server_live()


async def test_tritonclients_asyncio_client(secured: Secured) -> None:
    context = ssl.create_default_context(cafile=str(secured.files.ca))
    context.load_cert_chain(*secured.files.client)
    async with triton_aio.InferenceServerClient(address_of(secured), ssl=True, ssl_context=context) as client:
        given = tensor("x", X, "FP32")
        np.testing.assert_array_equal(
            (await client.infer("echo", [given], headers={**INFER})).as_numpy("y"), X
        )
        assert (await refusal(client.get_model_metadata("echo")))[0] == "401"


@needs(CURL)
def test_curl_reads_what_a_client_must_send(secured: Secured) -> None:
    certificate, key = map(str, secured.files.client)

    def curl(path: str, *options: str) -> tuple[list[str], str]:
        files = ("--cacert", str(secured.files.ca), "--cert", certificate, "--key", key)
        command = [str(CURL), "--silent", "--include", "--max-time", "60", *files, *options]
        ended = subprocess.run(
            [*command, secured.server.ready["http"] + path], capture_output=True, text=True, timeout=100
        )
        head, _, body = ended.stdout.partition("\n\n")
        return head.splitlines(), body

    head, body = curl("/v2/health/ready")
    assert (head[0], json.loads(body)) == ("HTTP/1.1 200 OK", {"ready": True})
    head, body = curl("/v2/models/echo")
    assert head[0] == "HTTP/1.1 401 Unauthorized"
    assert "WWW-Authenticate: Bearer" in head
    assert "token" in json.loads(body)["error"]
    head, _ = curl("/v2/models/echo", "--oauth2-bearer", "the-token-to-infer")
    assert head[0] == "HTTP/1.1 200 OK"
