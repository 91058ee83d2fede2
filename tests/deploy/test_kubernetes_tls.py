"""The server as the TLS overlay starts it, with Secrets as the kubelet mounts and renews them."""

from __future__ import annotations

import hashlib
import os
import secrets
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest
from deploy.manifests import DEPLOY, MANIFEST_TOOLS, Document, built, checked, pod_of
from polling import until
from support.processes.probe import WAIT_SECONDS, answer, output, request
from support.processes.server import ServerProcess
from support.server.certificates import LOCAL, KeyPair, authority, issue

from tensorferry.protos import inference_pb2_grpc

pytestmark = MANIFEST_TOOLS

# Values of the test: addresses, the models, and the drain time.
_OURS = ("--host=", "--port=", "--metrics-host=", "--metrics-port=", "--model-repository=", "--drain-delay-")


class SecretVolume:
    """A folder as the kubelet makes it of a Secret: each file is a link into a folder, which is
    replaced as a whole.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._versions = 0

    def write(self, files: Mapping[str, bytes]) -> None:
        """Replace the content of the Secret."""
        self._versions += 1
        version = self._folder / f"..{self._versions}"
        version.mkdir()
        for name, content in files.items():
            (version / name).write_bytes(content)
            (version / name).chmod(0o400)
            if not (self._folder / name).is_symlink():
                (self._folder / name).symlink_to(f"..data/{name}")
        (self._folder / "..new").symlink_to(version.name)
        os.replace(self._folder / "..new", self._folder / "..data")


def keys_of(pair: KeyPair, ca: KeyPair) -> dict[str, bytes]:
    """Return a Secret as cert-manager writes it."""
    return {"tls.crt": pair.pem, "tls.key": pair.key_pem, "ca.crt": ca.pem}


def token_line(client: str) -> tuple[str, bytes]:
    """Return a token, and its line in the file of tokens."""
    token = secrets.token_urlsafe(32)
    return token, f"{client} infer sha256:{hashlib.sha256(token.encode()).hexdigest()}\n".encode()


@pytest.fixture(scope="module")
def container() -> Document:
    _, container = pod_of(checked(built(DEPLOY / "kubernetes" / "overlays" / "tls"), "manifests"))
    assert isinstance(container, dict)
    return container


@pytest.fixture
def volumes(tmp_path: Path) -> dict[str, SecretVolume]:
    """Return the volumes by mount path."""
    return {name: SecretVolume(tmp_path / name) for name in ("tls", "callers")}


@pytest.fixture
def ca() -> KeyPair:
    return authority()


@pytest.fixture
def first(ca: KeyPair, volumes: Mapping[str, SecretVolume]) -> tuple[KeyPair, str]:
    """The certificate and the token with which the server starts."""
    pair, (token, line) = issue(ca, "first", LOCAL), token_line("first")
    volumes["tls"].write(keys_of(pair, ca))
    volumes["callers"].write({"tokens": line})
    return pair, token


@pytest.fixture
def server(
    transport: str, container: Document, first: tuple[KeyPair, str], probe_model: Path, tmp_path: Path
) -> Iterator[ServerProcess]:
    arguments = [
        argument.replace("/etc/tensorferry", str(tmp_path))
        for argument in container["args"][1:]
        if not argument.startswith(_OURS)
    ]
    server = ServerProcess.start(probe_model, *arguments, "--metrics-port=0", transport=transport)
    yield server
    assert server.stop() == 0
    assert not server.errors()


def served(server: ServerProcess) -> bytes:
    """Return the certificate of a new connection."""
    host, _, port = server.address.rpartition(":")
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port)), timeout=WAIT_SECONDS))


def infer(server: ServerProcess, ca: KeyPair, token: str) -> None:
    """Make a call on a new connection, which must be answered."""
    credentials = grpc.ssl_channel_credentials(ca.pem)
    with grpc.secure_channel(server.address, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        response = stub.ModelInfer(
            request(1), timeout=WAIT_SECONDS, metadata=[("authorization", f"Bearer {token}")]
        )
    assert output(response).tolist() == answer(1).tolist()


def infer_for_good(server: ServerProcess, ca: KeyPair, token: str) -> None:
    """Call until this token is refused; the server checks the file of callers once a second."""
    bound = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < bound:
        infer(server, ca, token)


def test_renewed_secrets_count_without_a_restart(
    server: ServerProcess,
    ca: KeyPair,
    first: tuple[KeyPair, str],
    volumes: Mapping[str, SecretVolume],
) -> None:
    pair, token = first
    assert served(server) == ssl.PEM_cert_to_DER_cert(pair.pem.decode())
    infer(server, ca, token)
    renewed, (other, line) = issue(ca, "renewed", LOCAL), token_line("other")
    volumes["tls"].write(keys_of(renewed, ca))
    volumes["callers"].write({"tokens": line})
    assert served(server) == ssl.PEM_cert_to_DER_cert(renewed.pem.decode())
    with pytest.raises(grpc.RpcError) as refused:
        infer_for_good(server, ca, token)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

    def accepted() -> bool:
        try:
            infer(server, ca, other)
        except grpc.RpcError:
            return False
        return True

    # Each of several processes reads the file at its own time.
    until(accepted)


def test_the_probes_are_answered_without_tls(server: ServerProcess, container: Document) -> None:
    metrics = server.ready["metrics"].removesuffix("/metrics")
    for when in ("startup", "readiness", "liveness"):
        path = container[f"{when}Probe"]["httpGet"]["path"]
        with urllib.request.urlopen(metrics + path, timeout=WAIT_SECONDS) as response:
            assert response.status == 200
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{metrics}/nothing", timeout=WAIT_SECONDS)
