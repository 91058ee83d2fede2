"""Identification of clients by certificate, over both transports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st
from support.server.certificates import LOCAL, KeyPair, authority, issue
from support.server.rig import Make, fp32, reproducible, request
from support.server.tokens import DENIED, METHODS, OK, TOKENS, UNAUTHENTICATED, bearer, outcome

from tensorferry.server.app import App
from tensorferry.server.errors import UnauthenticatedError
from tensorferry.server.security.access_control import AccessControl, ClientCertificate
from tensorferry.server.security.certificate_names import has_nul_in_name

pytestmark = pytest.mark.usefixtures("reload_on_every_call")


@dataclass
class Secured:
    """Server that requires client certificates, and its authorities."""

    app: App
    servers: KeyPair
    clients: KeyPair
    known: Path

    def infer(self, client: KeyPair, *metadata: tuple[str, str]) -> grpc.StatusCode:
        credentials = grpc.ssl_channel_credentials(self.servers.pem, client.key_pem, client.pem)
        with grpc.secure_channel(
            self.app.address, credentials, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            data = request({"x": fp32(1, 3)}).SerializeToString()
            unary = outcome(channel, METHODS["ModelInfer"], metadata, data)[0]
            stream = outcome(channel, METHODS["ModelStreamInfer"], metadata, data)[0]
            other = outcome(channel, METHODS["ServerMetadata"], metadata)[0]
        assert unary is stream is other
        return unary


class TestCertificates:
    @pytest.fixture
    def secured(self, start: Make, tmp_path: Path, tokens: Path) -> Secured:
        servers, clients = authority("of servers"), authority("of clients")
        certificate, key = issue(servers, "server", LOCAL).write(tmp_path, "tls")
        ca, known = tmp_path / "ca.crt", tmp_path / "known"
        ca.write_bytes(clients.pem)
        known.write_text(
            "web infer san:web.example\n"
            "mesh infer san:spiffe://cluster/ns/a/sa/b\n"
            "deploy control san:deploy.example\n"
            "old infer cn:Old Client\n"
        )
        app = start(
            tls_certificate=certificate,
            tls_key=key,
            tls_client_ca=ca,
            auth_certificates=known,
            auth_tokens=tokens,
        )
        return Secured(app, servers, clients, known)

    def test_a_client_is_identified_by_its_alternative_names_or_else_its_common_name(
        self, secured: Secured
    ) -> None:
        by = secured.clients
        uri = x509.UniformResourceIdentifier("spiffe://cluster/ns/a/sa/b")
        for client, expected in (
            (issue(by, "any", [x509.DNSName("web.example")]), OK),
            (issue(by, "any", [x509.DNSName("another.example"), uri]), OK),
            (issue(by, "Old Client"), OK),
            (issue(by, "any", [x509.DNSName("deploy.example")]), DENIED),
            (issue(by, "any", [x509.DNSName("another.example")]), UNAUTHENTICATED),
            # An alternative name does not match a `cn:` entry, and vice versa.
            (issue(by, "web.example"), UNAUTHENTICATED),
            (issue(by, "Old Client", [x509.DNSName("another.example")]), UNAUTHENTICATED),
            (issue(by, "any", [x509.DNSName("Old Client")]), UNAUTHENTICATED),
        ):
            assert secured.infer(client) is expected

    def test_a_token_takes_precedence_over_the_certificate(self, secured: Secured) -> None:
        known, unknown = issue(secured.clients, "Old Client"), issue(secured.clients, "Another")
        assert secured.infer(unknown, *bearer(TOKENS["infer"])) is OK
        assert secured.infer(known, *bearer(TOKENS["control"])) is DENIED
        assert secured.infer(known, *bearer("wrong-secret")) is UNAUTHENTICATED

    def test_a_name_with_a_nul_is_refused(self, secured: Secured) -> None:
        """grpcio truncates the name at the NUL."""
        by = secured.clients
        for client in (
            issue(by, "any", [x509.DNSName("web.example\0.evil.org")]),
            issue(by, "any", [x509.DNSName("another.example"), x509.DNSName("web.example\0.evil.org")]),
            issue(by, "any", [x509.DNSName("web.example"), x509.DNSName("a\0b")]),
            issue(by, "any", [x509.UniformResourceIdentifier("spiffe://cluster/ns/a/sa/b\0/c")]),
            issue(by, "any", [x509.RFC822Name("web.example\0@evil.org")]),
            issue(by, "Old Client\0.evil.org"),
        ):
            assert secured.infer(client) is UNAUTHENTICATED
        assert secured.infer(issue(by, "any\0", [x509.DNSName("web.example")])) is UNAUTHENTICATED
        assert secured.infer(issue(by, "any", [*LOCAL, x509.DNSName("web.example")])) is OK


def test_a_plain_connection_has_no_certificate(tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_text("a infer cn:a\n")
    access = AccessControl(certificates=known)
    access.open()
    with pytest.raises(Exception, match="this call needs a client certificate"):
        access.admit("infer", bearer("x"), lambda: "ipv4:1.2.3.4:5", lambda: ClientCertificate(None, ()))


def test_a_certificate_identifies_the_client_even_if_none_is_required() -> None:
    access = AccessControl()
    signer = authority()
    certificate = ClientCertificate("x509_common_name", (b"a",), issue(signer, "a").pem)
    assert access.admit("infer", (), lambda: "ipv4:1.2.3.4:5", lambda: certificate).name == "a"
    cut_off = ClientCertificate("x509_common_name", (b"a",), issue(signer, "a\0b").pem)
    with pytest.raises(UnauthenticatedError, match="has a NUL character"):
        access.admit("infer", (), lambda: "ipv4:1.2.3.4:5", lambda: cut_off)


SIGNER = authority()


@reproducible
@given(st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_a_damaged_certificate_raises_nothing(at: int, other: bytes) -> None:
    pem = SIGNER.pem
    assert has_nul_in_name(pem[:at] + other + pem[at + len(other) :]) in (True, False)


NOTHING_SIGNED = b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----"


@pytest.mark.parametrize(
    "pem", [SIGNER.pem[:100], SIGNER.key_pem, NOTHING_SIGNED], ids=["cut", "key", "empty sequence"]
)
def test_content_that_is_no_certificate_counts_as_a_name_with_a_nul(pem: bytes) -> None:
    assert has_nul_in_name(pem)
