"""Access control: identification and authorization of clients, for every method and both transports.

A client is identified by its token, else by its certificate. If the server requires neither, the client is identified
by its certificate or its address. Without any use for identities there is no `AccessControl`, and clients are
`ANONYMOUS`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from tensorferry.server.errors import PermissionDeniedError, StartError, UnauthenticatedError
from tensorferry.server.identity import INFER, ROLES, ClientIdentity, Metadata
from tensorferry.server.security.certificate_names import has_nul_in_name
from tensorferry.server.security.credential_files import (
    COMMON_NAME,
    SAN,
    CredentialFileError,
    read_certificates,
    read_tokens,
)
from tensorferry.server.security.file_watch import FileWatch

_log = logging.getLogger("tensorferry.server")

HEADER, SCHEME = "authorization", "bearer"

# Least interval between checks of the files, so a removed token works for at most this long.
_RELOAD_SECONDS = 1.0
# Interval between log lines about refused calls.
_REFUSAL_LOG_SECONDS = 10.0
# Limit for each cache, because clients can add entries.
_MAX_CACHED = 10_000
# Longer headers are not cached, because one token with different blanks makes any number of headers.
_MAX_CACHED_BYTES = 256

# gRPC's name for a certificate's common name, which it reports if there are no alternative names.
_BY_COMMON_NAME = "x509_common_name"


class ClientCertificate(NamedTuple):
    """Verified certificate of a client: its `names`, and their `kind` as gRPC calls it. None and b"" without one.

    `pem` is the certificate itself.
    """

    kind: str | None
    names: Sequence[bytes]
    pem: bytes = b""


class _Credentials(NamedTuple):
    """Content of the files, and a cache of headers with valid tokens."""

    tokens: Mapping[str, ClientIdentity]
    certificates: Mapping[str, ClientIdentity]
    headers: dict[str | bytes, ClientIdentity]


class AccessControl:
    """Identification of clients, and refusal of calls that they may not make. Thread-safe after `open`.

    With `tokens` or `certificates`, every call needs a token or certificate from these files. Changes of the files take
    effect within a second; a file that cannot be used changes nothing. Without files, clients are identified by their
    certificates or addresses and may call every method.
    """

    def __init__(self, *, tokens: Path | None = None, certificates: Path | None = None) -> None:
        self._tokens = tokens
        self._certificates = certificates
        self._required = tokens is not None or certificates is not None
        self._credentials = _Credentials({}, {}, {})
        # Number of reloads that changed something.
        self._generation = 0
        # Guards _watched, _file_error and every write of _credentials, _generation and _check_at. Files are read while it
        # is held; no thread waits for it, because other calls use the previous credentials.
        self._reload_lock = threading.Lock()
        self._watched = FileWatch([path for path in (tokens, certificates) if path is not None])
        self._check_at = self._log_refusals_at = time.monotonic()
        # The error that was last logged about the files.
        self._file_error = ""
        # Guards _log_refusals_at and _refused. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._refused = 0
        # Cache of identities by certificate name or address.
        self._by_origin_cache: dict[str, ClientIdentity] = {}

    def open(self) -> None:
        """Read the files. StartError if they cannot be used."""
        self._watched.changed()
        try:
            self._credentials = self._read()
        except CredentialFileError as error:
            # Not the path alone, because the other file's may begin with it.
            tokens = str(error).startswith((f"{self._tokens} ", f"{self._tokens},"))
            raise StartError(f"{'--auth-tokens' if tokens else '--auth-certificates'}: {error}") from None
        if self._required and not (self._credentials.tokens or self._credentials.certificates):
            files = " and ".join(str(path) for path in (self._tokens, self._certificates) if path is not None)
            _log.warning("%s has no entries: every call is refused until one is added", files)

    @property
    def generation(self) -> int:
        """Number that changes when the credentials change."""
        self._reload_if_changed()
        return self._generation

    def admit(
        self,
        role: str,
        metadata: Metadata,
        peer: Callable[[], str],
        certificate: Callable[[], ClientCertificate],
    ) -> ClientIdentity:
        """Return the client of a call to a method that requires this role. `ServerError` if the call is refused.

        `peer` and `certificate` are functions, because both are expensive to look up.
        """
        if not self._required:
            return self._by_origin(peer, certificate)
        self._reload_if_changed()
        credentials = self._credentials
        client = header = None
        if self._tokens is not None:
            for name, value in metadata:
                if name == HEADER:
                    header = value
                    client = credentials.headers.get(value) or _by_token(credentials, value)
                    break
        # A wrong token is refused even if the certificate is valid.
        if header is None and credentials.certificates:
            client = _by_certificate(credentials, self._without_nul(certificate(), peer))
        if client is None:
            self._log_refusal(peer)
            raise UnauthenticatedError(self._required_proof())
        if role not in client.roles:
            raise PermissionDeniedError(
                f"this method requires the role {role!r}, which {client.name} does not have: its roles are "
                f"{', '.join(sorted(client.roles))}"
            )
        return client

    def _by_origin(
        self, peer: Callable[[], str], certificate: Callable[[], ClientCertificate]
    ) -> ClientIdentity:
        names = self._without_nul(certificate(), peer).names
        origin = names[0].decode(errors="replace") if names else peer()
        client = self._by_origin_cache.get(origin)
        if client is None:
            client = ClientIdentity(origin if names else network_of(address_of(origin)), ROLES)
            if len(self._by_origin_cache) >= _MAX_CACHED:
                self._by_origin_cache = {}
            self._by_origin_cache[origin] = client
        return client

    def _without_nul(self, certificate: ClientCertificate, peer: Callable[[], str]) -> ClientCertificate:
        """Return the certificate. UnauthenticatedError if a name has a NUL, because grpcio truncates it there."""
        if certificate.names and has_nul_in_name(certificate.pem):
            self._log_refusal(peer)
            raise UnauthenticatedError(
                "a name in the client's certificate has a NUL character, or the certificate cannot be read: use another "
                "certificate"
            )
        return certificate

    def _reload_if_changed(self) -> None:
        """Read the files again if a check is due and they have changed."""
        now = time.monotonic()
        if now < self._check_at or not self._required or not self._reload_lock.acquire(blocking=False):
            return
        changed = error_text = None
        logged = self._file_error
        try:
            self._check_at = now + _RELOAD_SECONDS
            if self._watched.changed():
                changed = self._read()
                self._file_error = ""
                if changed[:2] == self._credentials[:2]:
                    changed = None
                else:
                    self._credentials = changed
                    self._generation += 1
        except CredentialFileError as error:
            self._file_error = error_text = str(error)
            self._watched.forget()
        finally:
            self._reload_lock.release()
        if error_text is not None and error_text != logged:
            _log.warning("access control: the previous credentials stay in force: %s", error_text)
        elif changed is not None:
            _log.info(
                "access control: reloaded %d tokens and %d certificate names",
                len(changed.tokens),
                len(changed.certificates),
            )

    def _read(self) -> _Credentials:
        return _Credentials(
            read_tokens(self._tokens) if self._tokens is not None else {},
            read_certificates(self._certificates) if self._certificates is not None else {},
            {},
        )

    def _required_proof(self) -> str:
        token = f"a token that this server accepts, as the metadata '{HEADER}: Bearer TOKEN'"
        certificate = "a client certificate with a name that it accepts"
        if self._tokens is None:
            return f"this call needs {certificate}"
        return f"this call needs {token}" + (f", or {certificate}" if self._certificates is not None else "")

    def _log_refusal(self, peer: Callable[[], str]) -> None:
        with self._lock:
            self._refused += 1
            now = time.monotonic()
            if now < self._log_refusals_at:
                return
            self._log_refusals_at = now + _REFUSAL_LOG_SECONDS
            refused, self._refused = self._refused, 0
        _log.warning(
            "access control: calls refused without a valid token or certificate: %d, the last from %s",
            refused,
            address_of(peer()),
        )


class StreamAuthorization:
    """Authorization of an open stream, checked again when the credentials change. Not thread-safe."""

    __slots__ = ("_access", "_call", "_generation", "client")

    def __init__(
        self,
        access: AccessControl,
        metadata: Metadata,
        peer: Callable[[], str],
        certificate: Callable[[], ClientCertificate],
    ) -> None:
        self._access = access
        self._call = metadata, peer, certificate
        self._generation = access.generation
        self.client = access.admit(INFER, *self._call)

    def refresh(self) -> ClientIdentity:
        """Return the stream's client. `ServerError` if the stream is no longer authorized."""
        generation = self._access.generation
        if generation != self._generation:
            self.client = self._access.admit(INFER, *self._call)
            self._generation = generation
        return self.client


def address_of(peer: str) -> str:
    """Return the address in gRPC's name of a peer, without the port, which differs for each connection."""
    kind, _, address = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        # Clients of Unix sockets have no address.
        return kind
    return address.rpartition(":")[0].strip("[]")


def network_of(address: str) -> str:
    """Return the name of an unnamed client: its IPv4 address, or its IPv6 network of 64 bits.

    A client with one address of such a network can use all of them.
    """
    if ":" not in address:
        return address
    try:
        own = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(own.ipv4_mapped or ipaddress.IPv6Network((own, 64), strict=False))


def _by_token(credentials: _Credentials, header: str | bytes) -> ClientIdentity | None:
    text = header if isinstance(header, str) else header.decode(errors="replace")
    scheme, _, token = text.partition(" ")
    if scheme.lower() != SCHEME:
        return None
    # Looked up by its hash, which a client cannot choose without the token, so timing reveals nothing about valid tokens.
    client = credentials.tokens.get(hashlib.sha256(token.strip().encode()).hexdigest())
    if client is not None and len(header) <= _MAX_CACHED_BYTES and len(credentials.headers) < _MAX_CACHED:
        credentials.headers[header] = client
    return client


def _by_certificate(credentials: _Credentials, certificate: ClientCertificate) -> ClientIdentity | None:
    kind = COMMON_NAME if certificate.kind == _BY_COMMON_NAME else SAN
    for name in certificate.names:
        client = credentials.certificates.get(kind + name.decode(errors="replace"))
        if client is not None:
            return client
    return None
