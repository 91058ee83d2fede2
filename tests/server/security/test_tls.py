"""TLS of a server over both transports: connections, client certificates, and changes of the files."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from support.server.certificates import LOCAL, KeyPair, authority, issue
from support.server.rig import PATIENCE, Make, fp32, request

from tensorferry.protos import inference_pb2_grpc
from tensorferry.server.app import App
from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.security.tls import TlsFiles


@dataclass(frozen=True)
class Files:
    """TLS files of a server, and their authority."""

    folder: Path
    ca: KeyPair
    certificate: Path
    key: Path

    def options(self, **more: Any) -> dict[str, Any]:
        return {"tls_certificate": self.certificate, "tls_key": self.key, **more}

    def replace(self, pair: KeyPair) -> None:
        """Replace both files one after the other, as a renewal does."""
        new = pair.write(self.folder, "new")
        for source, target in zip(new, (self.certificate, self.key), strict=True):
            os.replace(source, target)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    ca = authority()
    certificate, key = issue(ca, "server", LOCAL).write(tmp_path, "tls")
    return Files(tmp_path, ca, certificate, key)


def dial(app: App, ca: KeyPair, client: KeyPair | None = None, host: str = "127.0.0.1") -> grpc.Channel:
    own = {} if client is None else {"private_key": client.key_pem, "certificate_chain": client.pem}
    return grpc.secure_channel(
        f"{host}:{app.port}",
        grpc.ssl_channel_credentials(ca.pem, **own),
        options=[("grpc.use_local_subchannel_pool", 1)],
    )


def infer(channel: grpc.Channel, timeout: float = PATIENCE) -> float:
    stub: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    answer = stub.ModelInfer(request({"x": fp32(1, 3)}), timeout=timeout)
    return len(answer.raw_output_contents[0])


def served(app: App, ca: KeyPair, client: KeyPair | None = None) -> bytes:
    """Return the server's certificate on a new connection, in DER."""
    context = ssl.create_default_context(cadata=ca.pem.decode())
    if client is not None:
        # The function reads only files.
        folder = Path(app.config.models[0].path).parent
        context.load_cert_chain(*client.write(folder, "mine"))
    with (
        socket.create_connection(("127.0.0.1", app.port), PATIENCE) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
        assert shown is not None
        return shown


def _without_descriptors(*arguments: Any, **options: Any) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def der(pair: KeyPair) -> bytes:
    return pair.certificate.public_bytes(serialization.Encoding.DER)


def refusal(channel: grpc.Channel) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        infer(channel)
    code: grpc.StatusCode = caught.value.code()
    return code


def test_an_authority_of_clients_need_not_be_a_root(start: Make, files: Files) -> None:
    """Over gRPC, and in the context of other transports."""
    between = authority("between", files.ca)
    client = issue(between, "client")
    path = files.folder / "between.crt"
    path.write_bytes(between.pem)
    with dial(start(**files.options(tls_client_ca=path)), files.ca, client) as channel:
        infer(channel)
    of_client = ssl.create_default_context(cadata=files.ca.pem.decode())
    of_client.load_cert_chain(*client.write(files.folder, "mine"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_end = of_client.wrap_bio(to_client, to_server, server_hostname="localhost")
    context = TlsFiles(files.certificate, files.key, path).context()
    server_end = context.wrap_bio(to_server, to_client, server_side=True)
    for end in (client_end, server_end, client_end, server_end):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    assert server_end.getpeercert(binary_form=True) == der(client)


def test_plain_connections_are_refused(start: Make, files: Files) -> None:
    app = start(**files.options())
    with grpc.insecure_channel(app.address) as channel:
        assert refusal(channel) is grpc.StatusCode.UNAVAILABLE
    with dial(app, authority("another")) as channel:
        assert refusal(channel) is grpc.StatusCode.UNAVAILABLE
    assert served(app, files.ca)


def test_tls_1_2_is_accepted_and_1_1_refused(start: Make, files: Files) -> None:
    app = start(**files.options())

    def version(most: ssl.TLSVersion) -> str | None:
        context = ssl.create_default_context(cadata=files.ca.pem.decode())
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        context.minimum_version, context.maximum_version = ssl.TLSVersion.MINIMUM_SUPPORTED, most
        with (
            socket.create_connection(("127.0.0.1", app.port), PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            return secured.version()

    assert version(ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    with (
        pytest.warns(DeprecationWarning, match="TLSv1_1"),
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        version(ssl.TLSVersion.TLSv1_1)


class TestClientCertificates:
    @pytest.fixture
    def ca(self) -> KeyPair:
        return authority("of clients")

    @pytest.fixture
    def app(self, start: Make, files: Files, ca: KeyPair) -> App:
        path = files.folder / "clients.crt"
        path.write_bytes(ca.pem)
        return start(**files.options(tls_client_ca=path))

    def test_missing_foreign_and_expired_certificates_are_refused(
        self, app: App, files: Files, ca: KeyPair
    ) -> None:
        for client in (
            None,
            issue(authority("another"), "client"),
            issue(files.ca, "client"),
            issue(ca, "client", begins=-2, ends=-1),
            issue(ca, "client", begins=1, ends=2),
        ):
            with dial(app, files.ca, client) as channel:
                assert refusal(channel) is grpc.StatusCode.UNAVAILABLE

    def test_a_new_authority_takes_effect_for_new_connections(
        self, app: App, files: Files, ca: KeyPair
    ) -> None:
        other = authority("of clients, next")
        path = app.config.tls_client_ca
        assert path is not None
        with (
            dial(app, files.ca, issue(ca, "client")) as before,
            dial(app, files.ca, issue(other, "c")) as later,
        ):
            assert infer(before) == 12
            assert refusal(later) is grpc.StatusCode.UNAVAILABLE
            # Both authorities first, so that clients can be migrated.
            path.write_bytes(ca.pem + other.pem)
            with dial(app, files.ca, issue(other, "c")) as channel:
                assert infer(channel) == 12
            with dial(app, files.ca, issue(ca, "c")) as channel:
                assert infer(channel) == 12
            path.write_bytes(other.pem)
            with dial(app, files.ca, issue(ca, "c")) as channel:
                assert refusal(channel) is grpc.StatusCode.UNAVAILABLE
            # Existing connections are kept.
            assert infer(before) == 12


class TestReload:
    def test_new_files_take_effect_for_new_connections(
        self, start: Make, files: Files, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        app = start(**files.options())
        with dial(app, files.ca) as open_before:
            assert infer(open_before) == 12
            for name in ("second", "third"):
                pair = issue(files.ca, name, LOCAL)
                files.replace(pair)
                assert served(app, files.ca) == der(pair)
                assert served(app, files.ca) == der(pair)
            assert infer(open_before) == 12
        logged = [record.getMessage() for record in caplog.records if "new TLS files" in record.getMessage()]
        assert len(logged) == 2
        assert str(files.certificate) in logged[0]

    def test_text_around_certificates_is_ignored(self, start: Make, files: Files) -> None:
        comment = "# Autorität für Übung\n".encode()
        files.certificate.write_bytes(comment + files.certificate.read_bytes())
        authorities = files.folder / "clients.crt"
        authorities.write_bytes(comment + files.ca.pem)
        client = issue(files.ca, "client")
        app = start(**files.options(tls_client_ca=authorities))
        pair = issue(files.ca, "second", LOCAL)
        files.replace(pair)
        files.certificate.write_bytes(comment + files.certificate.read_bytes())
        assert served(app, files.ca, client) == der(pair)

    def test_a_new_certificate_is_used_once_its_key_is_there(
        self, start: Make, files: Files, caplog: pytest.LogCaptureFixture
    ) -> None:
        app = start(**files.options())
        before = served(app, files.ca)
        pair = issue(files.ca, "second", LOCAL)
        files.certificate.write_bytes(pair.pem)
        for _ in range(3):
            assert served(app, files.ca) == before
        (logged,) = [
            record.getMessage() for record in caplog.records if "cannot be used, so" in record.getMessage()
        ]
        assert "does not belong to the certificate" in logged
        files.key.write_bytes(pair.key_pem)
        assert served(app, files.ca) == der(pair)

    def test_a_temporarily_unreadable_file_is_read_later(
        self, start: Make, files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """For example, the process may have had no free file descriptor."""
        app = start(**files.options())
        before = served(app, files.ca)
        pair = issue(files.ca, "second", LOCAL)
        files.replace(pair)
        for fails in ("pathlib.Path.open", "os.memfd_create"):
            with monkeypatch.context() as patch:
                patch.setattr(fails, _without_descriptors)
                assert served(app, files.ca) == before
                assert served(app, files.ca) == before
        logged = [
            record.getMessage() for record in caplog.records if "cannot be used, so" in record.getMessage()
        ]
        assert len(logged) == 2
        assert all("Too many open files" in message for message in logged)
        assert served(app, files.ca) == der(pair)


class TestStart:
    """Unusable files are errors at the start, which name the file and the fault."""

    def error(self, files: Files, **more: Any) -> str:
        app = App(ServerConfig((), port=0, transport="threaded", **files.options(**more)))
        try:
            with pytest.raises(StartError) as caught:
                app.start()
        finally:
            app.stop()
        return str(caught.value)

    def test_a_key_of_another_certificate_is_an_error(self, files: Files) -> None:
        files.key.write_bytes(issue(files.ca, "another").key_pem)
        assert "does not belong to the certificate" in self.error(files)

    def test_an_encrypted_key_is_an_error(self, files: Files) -> None:
        pair = issue(files.ca, "server", LOCAL)
        files.certificate.write_bytes(pair.pem)
        files.key.write_bytes(pair.key_in(serialization.BestAvailableEncryption(b"secret")))
        assert f"the key in {files.key} is encrypted" in self.error(files)

    def test_an_unsupported_key_type_is_an_error(self, files: Files) -> None:
        files.replace(issue(files.ca, "server", LOCAL, key=ed25519.Ed25519PrivateKey.generate()))
        assert "Ed25519" in self.error(files)

    def test_authorities_without_ca_certificates_are_an_error(self, files: Files) -> None:
        path = files.folder / "clients.crt"
        path.write_bytes(files.key.read_bytes())
        assert f"{path} is not a PEM certificate" in self.error(files, tls_client_ca=path)
        path.write_bytes(files.certificate.read_bytes())
        assert f"no certificate in {path} is an authority's" in self.error(files, tls_client_ca=path)

    def test_errors_quote_nothing_of_a_key(self, files: Files) -> None:
        body = files.key.read_text().splitlines()[1]
        files.certificate.write_text(files.key.read_text())
        assert body not in self.error(files)
