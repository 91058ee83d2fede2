"""Options of TLS, authentication, and what clients may do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tensorferry.server.config.option import OptionScope, option
from tensorferry.server.config.parsers import path, switch


@dataclass(frozen=True, kw_only=True)
class SecurityOptions:
    """Options of TLS and authentication, all with the scope STANDALONE."""

    tls_certificate: Path | None = option(
        None,
        path,
        "PEM file with the server's certificate and its intermediate certificates; the port then accepts only TLS; read "
        "again when it changes",
    )
    tls_key: Path | None = option(
        None,
        path,
        "PEM file with the private key of --tls-certificate; read again when it changes",
    )
    tls_client_ca: Path | None = option(
        None,
        path,
        "PEM file with certificate authorities; only clients with a certificate of one of them can connect; read again "
        "when it changes",
    )
    auth_tokens: Path | None = option(
        None,
        path,
        "file with the clients that may call by bearer token, one line for each as printed by tensorferry token; read "
        "again when it changes",
    )
    auth_certificates: Path | None = option(
        None,
        path,
        "file with the clients that may call by certificate, with lines NAME ROLES san:NAME or NAME ROLES cn:NAME; read "
        "again when it changes",
    )
    auth_over_plaintext: bool = option(
        False,
        switch,
        "accept tokens without TLS from other machines, as needed behind a proxy that terminates TLS",
    )


@dataclass(frozen=True, kw_only=True)
class PermissionOptions:
    """Options that decide what clients may do, and which statuses they get."""

    allow_shared_memory: bool = option(
        False,
        switch,
        "allow clients to register POSIX shared memory that this process can open, and device memory that another "
        "process exports, and to keep tensors there",
        scope=OptionScope.STANDALONE,
    )
    allow_log_settings: bool = option(
        False,
        switch,
        "allow clients to change what is logged, by LogSettings; reading the settings is always allowed",
        scope=OptionScope.STANDALONE,
    )
    triton_status_codes: bool = option(
        False,
        switch,
        "return UNAVAILABLE, as Triton does, when a queue is full or a deadline passes",
    )
