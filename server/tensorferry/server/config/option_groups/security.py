"""Options of TLS and authentication."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tensorferry.server.config.option import OptionScope, option
from tensorferry.server.config.parsers import path, switch


@dataclass(frozen=True, kw_only=True)
class SecurityOptions:
    """Options of TLS and authentication."""

    tls_certificate: Path | None = option(
        None,
        path,
        "PEM file with the server's certificate and its intermediate certificates; the port then accepts only TLS; read "
        "again when it changes",
        scope=OptionScope.STANDALONE,
    )
    tls_key: Path | None = option(
        None,
        path,
        "PEM file with the private key of --tls-certificate; read again when it changes",
        scope=OptionScope.STANDALONE,
    )
    tls_client_ca: Path | None = option(
        None,
        path,
        "PEM file with certificate authorities; only clients with a certificate of one of them can connect; read again "
        "when it changes",
        scope=OptionScope.STANDALONE,
    )
    auth_tokens: Path | None = option(
        None,
        path,
        "file with the clients that may call by bearer token, one line for each as printed by tensorferry token; read "
        "again when it changes",
        scope=OptionScope.STANDALONE,
    )
    auth_certificates: Path | None = option(
        None,
        path,
        "file with the clients that may call by certificate, with lines NAME ROLES san:NAME or NAME ROLES cn:NAME; read "
        "again when it changes",
        scope=OptionScope.STANDALONE,
    )
    auth_over_plaintext: bool = option(
        False,
        switch,
        "accept tokens without TLS from other machines, as needed behind a proxy that terminates TLS",
        scope=OptionScope.STANDALONE,
    )
