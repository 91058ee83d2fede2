"""TLS of the server's ports: the certificate, its key, the authorities for client certificates, and clients' certificates.

Files are checked before each handshake, so changed files take effect at the next one. A file that cannot be used is an
error at the start. Later it is logged, and the previous files stay in use.
"""

from __future__ import annotations

import base64
import logging
import os
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tensorferry.server.errors import StartError
from tensorferry.server.security.access_control import ClientCertificate
from tensorferry.server.security.file_watch import FileWatch

_log = logging.getLogger("tensorferry.server")

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEY = re.compile(rb"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----\s+([A-Za-z0-9+/=\s]+?)-----END")
_ENCRYPTED = (b"BEGIN ENCRYPTED PRIVATE KEY", b"Proc-Type: 4,ENCRYPTED")
# First bytes of Ed25519 and Ed448 keys, which gRPC's TLS does not support.
_EDWARDS = (bytes.fromhex("06032b6570"), bytes.fromhex("06032b6571"))
_HEAD_BYTES = 32

# Far more than any certificate chain. The limit matters for devices and pipes, which have no end.
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _KeyPair:
    """Certificate with its key, the client authorities, a context with all of them, and when the certificate expires."""

    certificate: bytes
    key: bytes
    authorities: bytes | None
    context: ssl.SSLContext = field(compare=False)
    expires: str


class TlsFiles:
    """TLS files of the server's port. Thread-safe. StartError if they cannot be used.

    With `client_ca`, only clients with a certificate of these authorities can connect.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._watched = FileWatch([certificate, key] if client_ca is None else [certificate, key, client_ca])
        # Guards the fields below and _watched. Files are read while it is held, because each handshake needs the result.
        self._lock = threading.Lock()
        self._watched.changed()
        try:
            self._current = self._read()
        except OSError as error:
            raise StartError(str(error)) from None
        self._file_error = ""
        # What gRPC core has.
        self._in_core = self._current

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for `grpc.Server.add_secure_port`."""
        # None means "unchanged", which the type stubs do not allow.
        fetch: Any = self._fetch
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._current), fetch, self._client_ca is not None
        )

    def context(self) -> ssl.SSLContext:
        """Return the context of a handshake, for transports that are not gRPC's."""
        return self._refreshed().context

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new configuration, or None if it is unchanged. gRPC core calls this before each handshake."""
        pair = self._refreshed()
        with self._lock:
            before, self._in_core = self._in_core, pair
        return None if pair == before else _configuration(pair)

    def _refreshed(self) -> _KeyPair:
        """Return the files' content, which is read again if they have changed."""
        with self._lock:
            if not self._watched.changed():
                return self._current
            file_error, pair = "", self._current
            try:
                pair = self._read()
            except Exception as error:
                # No exception may reach gRPC core. The files are read again at the next handshake.
                file_error = str(error) if isinstance(error, (StartError, OSError)) else repr(error)
                self._watched.forget()
            logged, self._file_error = self._file_error, file_error
            changed, self._current = pair != self._current, pair
        if file_error and file_error != logged:
            _log.warning("the new TLS files cannot be used, so the previous ones stay in use: %s", file_error)
        if changed:
            _log.info("new TLS files from %s, valid until %s", self._certificate, pair.expires)
        return pair

    def _read(self) -> _KeyPair:
        certificate, key = _read_file(self._certificate), _read_file(self._key)
        _check_key_pair(self._certificate, certificate, self._key, key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        authorities = None
        if self._client_ca is not None:
            authorities = _read_file(self._client_ca)
            _trust(context, self._client_ca, authorities)
        with _in_memory(certificate) as certificate_path, _in_memory(key) as key_path:
            try:
                context.load_cert_chain(certificate_path, key_path)
            except ssl.SSLError as error:
                if error.reason == "KEY_VALUES_MISMATCH":
                    raise StartError(
                        f"the key in {self._key} does not belong to the certificate in {self._certificate}, the first "
                        "in its file: give the key that it was made with"
                    ) from None
                raise StartError(
                    f"the certificate in {self._certificate} and the key in {self._key} cannot be used: {_ssl_reason(error)}"
                ) from None
        return _KeyPair(
            certificate, key, authorities, context, _expiry(self._certificate, certificate, context)
        )


def client_certificate(ssl_object: Any) -> ClientCertificate:
    """Return the certificate of a TLS connection's client in gRPC's terms: alternative names before the common name."""
    details = ssl_object.getpeercert() if ssl_object is not None else None
    if not details:
        return ClientCertificate(None, ())
    names = [
        value.encode()
        for kind, value in details.get("subjectAltName", ())
        if kind in ("DNS", "URI", "email", "IP Address")
    ]
    kind = "x509_subject_alternative_name"
    if not names:
        kind = "x509_common_name"
        names = [
            value.encode()
            for part in details.get("subject", ())
            for name, value in part
            if name == "commonName"
        ]
    return ClientCertificate(kind, names, ssl.DER_cert_to_PEM_cert(ssl_object.getpeercert(True)).encode())


def _configuration(pair: _KeyPair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)], pair.authorities)


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise StartError(f"{path} has more than {_MAX_BYTES} bytes; it must be a PEM file")
    return data


def _check_key_pair(certificate_path: Path, certificate: bytes, key_path: Path, key: bytes) -> None:
    if _CERTIFICATE not in certificate:
        raise StartError(
            f"{certificate_path} is not a PEM certificate: it has no line {_CERTIFICATE.decode()!r}"
        )
    if any(mark in key for mark in _ENCRYPTED):
        raise StartError(f"the key in {key_path} is encrypted; give an unencrypted key")
    found = _KEY.search(key)
    if found is None:
        raise StartError(f"{key_path} is not a PEM private key: it has no line '-----BEGIN PRIVATE KEY-----'")
    try:
        head = base64.b64decode(found[1])[:_HEAD_BYTES]
    except ValueError:
        raise StartError(f"the private key in {key_path} is damaged: it is not base64") from None
    if any(mark in head for mark in _EDWARDS):
        raise StartError(
            f"the key in {key_path} is an Ed25519 or Ed448 key, which gRPC does not support; use ECDSA (P-256) or RSA"
        )


def _trust(context: ssl.SSLContext, path: Path, data: bytes) -> None:
    """Require certificates of these authorities from clients. StartError if there is none."""
    if _CERTIFICATE not in data:
        raise StartError(f"{path} is not a PEM certificate: it has no line {_CERTIFICATE.decode()!r}")
    context.verify_mode = ssl.CERT_REQUIRED
    # As gRPC does: an authority in the file need not be a root.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=data.decode("ascii", "ignore"))
    except ssl.SSLError as error:
        raise StartError(f"the certificates in {path} cannot be read: {_ssl_reason(error)}") from None
    if not context.cert_store_stats()["x509_ca"]:
        raise StartError(
            f"no certificate in {path} is an authority's (basicConstraints CA:TRUE), so it could not verify any client's"
        )


def _expiry(path: Path, certificate: bytes, server: ssl.SSLContext) -> str:
    """Return when the certificate expires, found by a handshake in memory with a client that trusts it."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=certificate.decode("ascii", "ignore"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_end = client.wrap_bio(to_client, to_server)
    server_end = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (client_end, server_end, client_end):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
        return str((client_end.getpeercert() or {})["notAfter"])
    except ssl.SSLCertVerificationError as error:
        raise StartError(
            f"no client would accept the certificate in {path}: {error.verify_message}"
        ) from None
    except (ssl.SSLError, KeyError, ValueError) as error:
        raise StartError(
            f"the certificate in {path} and its key cannot be used for a connection: {_ssl_reason(error)}"
        ) from None


def _ssl_reason(error: Exception) -> str:
    return (getattr(error, "reason", None) or "they cannot be read").replace("_", " ").lower()


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """Yield a path to data in memory. The file may have changed since it was read, and keys must not go to disk."""
    descriptor = os.memfd_create("tensorferry-tls")
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
