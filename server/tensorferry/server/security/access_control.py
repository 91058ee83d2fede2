"""Who may call, for every method and both transports.

A call is known by its token, else by its client's certificate; where the server asks for neither, by the address that
it comes from. Where nothing wants to know there is no `AccessControl` at all, and every call is `ANONYMOUS`'s.
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

from tensorferry.server.config.limits import identifies_clients
from tensorferry.server.config.server_config import ServerConfig
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

# How often the files are looked at, at most: a token that was taken away is good for no longer.
_RELOAD_SECONDS = 1.0
# Those that send a wrong token are told of in the log this often, with their number.
_REFUSAL_LOG_SECONDS = 10.0
# What is remembered of callers, so that a client can make it grow no further.
_MAX_CACHED = 10_000
# Blanks may make of one token any number of headers, as long as metadata may be.
_MAX_CACHED_BYTES = 256

# What of a certificate the names are, when it has no other: its common name.
_BY_COMMON_NAME = "x509_common_name"


class ClientCertificate(NamedTuple):
    """What a client proved by its certificate: `names`, and what of it they are, by grpc's word; None without one.

    `pem` is the certificate itself, b"" without one.
    """

    kind: str | None
    names: Sequence[bytes]
    pem: bytes = b""


class _Credentials(NamedTuple):
    """What the files say, and the texts of the headers that were found in them."""

    tokens: Mapping[str, ClientIdentity]
    certificates: Mapping[str, ClientIdentity]
    headers: dict[str | bytes, ClientIdentity]


class AccessControl:
    """Tells whose a call is, and refuses those who may not make it. Thread-safe, once `open` was called.

    With `tokens` or `certificates` every call must have one or the other of what is in these files, which are looked at again
    while the server runs: what is in them counts a second later, and a file that cannot be used changes nothing.
    Without, callers are told apart by their certificates or addresses, and may do everything.
    """

    def __init__(self, *, tokens: Path | None = None, certificates: Path | None = None) -> None:
        self._tokens = tokens
        self._certificates = certificates
        self._asks = tokens is not None or certificates is not None
        self._known = _Credentials({}, {}, {})
        # How often the files were read anew.
        self._generation = 0
        # Held by whoever reads the files, for which nobody waits: the others go by what was read before. Guards
        # _watched, _wrong and every write of _known, _generation and _look_at.
        self._reading = threading.Lock()
        self._watched = FileWatch([path for path in (tokens, certificates) if path is not None])
        self._look_at = self._tell_at = time.monotonic()
        # What is wrong with the files, as the log has it already.
        self._wrong = ""
        # Guards _tell_at and _refused. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._refused = 0
        # By where they come from, for those who are known by that.
        self._callers: dict[str, ClientIdentity] = {}

    def open(self) -> None:
        """Reads the files; StartError when they cannot be used."""
        self._watched.changed()
        try:
            self._known = self._read()
        except CredentialFileError as error:
            raise StartError(str(error)) from None
        if self._asks and not (self._known.tokens or self._known.certificates):
            files = " and ".join(str(path) for path in (self._tokens, self._certificates) if path is not None)
            _log.warning("%s names nobody: every call is refused until somebody is added", files)

    @property
    def generation(self) -> int:
        """Another number once the files say something else."""
        self._look()
        return self._generation

    def admit(
        self,
        role: str,
        metadata: Metadata,
        peer: Callable[[], str],
        certificate: Callable[[], ClientCertificate],
    ) -> ClientIdentity:
        """Who calls a method that wants this role; a `ServerError` that says why it must not.

        Peer and certificate are functions, since it takes a while to find them out.
        """
        if not self._asks:
            return self._by_origin(peer, certificate)
        self._look()
        known = self._known
        caller = header = None
        if self._tokens is not None:
            for name, value in metadata:
                if name == HEADER:
                    header = value
                    caller = known.headers.get(value) or _by_token(known, value)
                    break
        # A token that is wrong is not made good by a certificate.
        if header is None and known.certificates:
            caller = _by_certificate(known, self._checked(certificate(), peer))
        if caller is None:
            self._tell_of_refusal(peer)
            raise UnauthenticatedError(self._wanted())
        if role not in caller.roles:
            raise PermissionDeniedError(
                f"this method wants the role {role!r}, which {caller.name} does not have: its roles are "
                f"{', '.join(sorted(caller.roles))}"
            )
        return caller

    def _by_origin(
        self, peer: Callable[[], str], certificate: Callable[[], ClientCertificate]
    ) -> ClientIdentity:
        names = self._checked(certificate(), peer).names
        origin = names[0].decode(errors="replace") if names else peer()
        caller = self._callers.get(origin)
        if caller is None:
            caller = ClientIdentity(origin if names else network_of(address_of(origin)), ROLES)
            if len(self._callers) >= _MAX_CACHED:
                self._callers = {}
            self._callers[origin] = caller
        return caller

    def _checked(self, certificate: ClientCertificate, peer: Callable[[], str]) -> ClientCertificate:
        """The certificate; UnauthenticatedError for one with a name that grpcio has cut short."""
        if certificate.names and has_nul_in_name(certificate.pem):
            self._tell_of_refusal(peer)
            raise UnauthenticatedError(
                "a name in the client's certificate has a NUL character, or the certificate cannot be read; this server takes "
                "no such name: use another certificate"
            )
        return certificate

    def _look(self) -> None:
        """Reads the files again when they have changed, and it is time to look."""
        now = time.monotonic()
        if now < self._look_at or not self._asks or not self._reading.acquire(blocking=False):
            return
        known = wrong = None
        told = self._wrong
        try:
            self._look_at = now + _RELOAD_SECONDS
            if self._watched.changed():
                known = self._read()
                self._wrong = ""
                if known[:2] == self._known[:2]:
                    known = None
                else:
                    self._known = known
                    self._generation += 1
        except CredentialFileError as error:
            self._wrong = wrong = str(error)
            self._watched.forget()
        finally:
            self._reading.release()
        if wrong is not None and wrong != told:
            _log.warning("who may call is not changed, what was read before goes on: %s", wrong)
        elif known is not None:
            _log.info(
                "who may call was read anew: %d tokens, %d names of certificates",
                len(known.tokens),
                len(known.certificates),
            )

    def _read(self) -> _Credentials:
        return _Credentials(
            read_tokens(self._tokens) if self._tokens is not None else {},
            read_certificates(self._certificates) if self._certificates is not None else {},
            {},
        )

    def _wanted(self) -> str:
        token = f"a token that this server knows, as the metadata '{HEADER}: Bearer TOKEN'"
        certificate = "a client certificate with a name that it knows"
        if self._tokens is None:
            return f"this call needs {certificate}"
        return f"this call needs {token}" + (f", or {certificate}" if self._certificates is not None else "")

    def _tell_of_refusal(self, peer: Callable[[], str]) -> None:
        with self._lock:
            self._refused += 1
            now = time.monotonic()
            if now < self._tell_at:
                return
            self._tell_at = now + _REFUSAL_LOG_SECONDS
            refused, self._refused = self._refused, 0
        _log.warning(
            "calls refused for want of a known token or certificate: %d, the last from %s",
            refused,
            address_of(peer()),
        )


class StreamAuthorization:
    """Of an open stream, whose it is: found out again when the files have changed. For one thread at a time."""

    __slots__ = ("_access", "_call", "_generation", "caller")

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
        self.caller = access.admit(INFER, *self._call)

    def refresh(self) -> ClientIdentity:
        """Whose it is now; a `ServerError` when it may not go on."""
        generation = self._access.generation
        if generation != self._generation:
            self.caller = self._access.admit(INFER, *self._call)
            self._generation = generation
        return self.caller


def access_control_for(config: ServerConfig) -> AccessControl | None:
    """What the configuration asks for; None where nothing wants to know who calls."""
    if config.auth_tokens is None and config.auth_certificates is None and not identifies_clients(config):
        return None
    return AccessControl(tokens=config.auth_tokens, certificates=config.auth_certificates)


def address_of(peer: str) -> str:
    """The address in grpc's name of a peer, without the port, which is another for each connection."""
    kind, _, address = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        # Sockets of the file system, whose clients have no names.
        return kind
    return address.rpartition(":")[0].strip("[]")


def network_of(address: str) -> str:
    """By what a client is told apart from others that have no name: its address, of IPv6 the 64 bits of its network.

    Whoever has one address of such a network has all of them.
    """
    if ":" not in address:
        return address
    try:
        network = ipaddress.IPv6Network((address.partition("%")[0], 64), strict=False)
    except ValueError:
        return address
    mapped = (
        network.network_address.ipv4_mapped or ipaddress.IPv6Address(address.partition("%")[0]).ipv4_mapped
    )
    return str(mapped or network)


def _by_token(known: _Credentials, header: str | bytes) -> ClientIdentity | None:
    text = header if isinstance(header, str) else header.decode(errors="replace")
    scheme, _, token = text.partition(" ")
    if scheme.lower() != SCHEME:
        return None
    # Found by its hash, of which nobody who does not know the token can choose a single bit: how long it takes
    # says nothing of those that there are.
    caller = known.tokens.get(hashlib.sha256(token.strip().encode()).hexdigest())
    if caller is not None and len(header) <= _MAX_CACHED_BYTES and len(known.headers) < _MAX_CACHED:
        known.headers[header] = caller
    return caller


def _by_certificate(known: _Credentials, certificate: ClientCertificate) -> ClientIdentity | None:
    kind = COMMON_NAME if certificate.kind == _BY_COMMON_NAME else SAN
    for name in certificate.names:
        caller = known.certificates.get(kind + name.decode(errors="replace"))
        if caller is not None:
            return caller
    return None
