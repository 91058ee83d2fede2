"""Certificates with the extensions that RFC 5280 requires, because Python 3.13 verifies them."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)

LOCAL: Sequence[x509.GeneralName] = (
    x509.DNSName("localhost"),
    x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
)


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: Any

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key_in(serialization.NoEncryption())

    def key_in(self, encryption: serialization.KeySerializationEncryption) -> bytes:
        pem: bytes = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )
        return pem

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Write the certificate and the key. Return their paths."""
        certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
        certificate.write_bytes(self.pem)
        key.write_bytes(self.key_pem)
        return certificate, key


def authority(name: str = "authority", by: KeyPair | None = None) -> KeyPair:
    """Return an authority that can sign certificates; signed `by` another one, else a root."""
    return _make(name, by, (), ca=True)


def issue(
    by: KeyPair,
    name: str,
    sans: Sequence[x509.GeneralName] = (),
    *,
    begins: float = -1,
    ends: float = 1,
    key: Any = None,
) -> KeyPair:
    """Return a signed certificate. `begins` and `ends` are its validity in days from now."""
    return _make(name, by, sans, ca=False, begins=begins, ends=ends, key=key)


@dataclass(frozen=True)
class Issued:
    """Files of an authority, and of the certificates that it has signed for a local server and a client."""

    ca: Path
    server: tuple[Path, Path]
    client: tuple[Path, Path]

    @classmethod
    def in_folder(cls, folder: Path) -> Issued:
        signer, ca = authority(), folder / "ca.crt"
        ca.write_bytes(signer.pem)
        server = issue(signer, "server", LOCAL).write(folder, "server")
        return cls(ca, server, issue(signer, "client").write(folder, "client"))

    @property
    def flags(self) -> tuple[str | Path, ...]:
        """Flags of a server that requires client certificates."""
        certificate, key = self.server
        return ("--tls-certificate", certificate, "--tls-key", key, "--tls-client-ca", self.ca)


def _make(
    common_name: str,
    by: KeyPair | None,
    sans: Sequence[x509.GeneralName],
    *,
    ca: bool,
    begins: float = -1,
    ends: float = 1,
    key: Any = None,
) -> KeyPair:
    key = key or ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name if by is None else by.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins * _DAY)
        .not_valid_after(now + ends * _DAY)
        .add_extension(x509.BasicConstraints(ca, None), critical=True)
        .add_extension(_key_usage(ca), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if not ca:
        either = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
        builder = builder.add_extension(x509.ExtendedKeyUsage(either), critical=False)
    if by is not None:
        identifier = by.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
        )
    if sans:
        builder = builder.add_extension(x509.SubjectAlternativeName(sans), critical=False)
    return KeyPair(builder.sign(key if by is None else by.key, hashes.SHA256()), key)


def _key_usage(ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )
