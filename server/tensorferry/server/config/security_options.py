"""The options that say who may connect and call, and what the server shows."""

from __future__ import annotations

import ipaddress

from tensorferry.server.config.option_types import Option, path, switch
from tensorferry.server.config.server_config import ConfigError, ServerConfig

SECURITY_OPTIONS: tuple[Option, ...] = (
    Option(
        "tls-certificate",
        "tls_certificate",
        path,
        "a path",
        "PEM file of the server's certificate and those between it and its authority; with it the port is TLS only. Read "
        "again when it changes, as the two below",
    ),
    Option("tls-key", "tls_key", path, "a path", "PEM file of that certificate's private key"),
    Option(
        "tls-client-ca",
        "tls_client_ca",
        path,
        "a path",
        "PEM file of authorities: only clients with a certificate of theirs can connect",
    ),
    Option(
        "auth-tokens",
        "auth_tokens",
        path,
        "a path",
        "file of who may call by a bearer token, with lines as tensorferry token prints them; read again when it changes",
    ),
    Option(
        "auth-certificates",
        "auth_certificates",
        path,
        "a path",
        "file of who may call by a client certificate, with lines NAME ROLES san:NAME or cn:NAME; read again when it changes",
    ),
    switch(
        "auth-exempt-health",
        "auth_exempt_health",
        "whether anybody may ask for health (Check and Watch), ServerLive and ServerReady",
    ),
    switch(
        "auth-over-plaintext",
        "auth_over_plaintext",
        "let tokens be sent to this port without TLS from other machines, as behind a proxy that ends TLS",
    ),
    switch(
        "reflection",
        "reflection",
        "whether clients may ask for the protocol's descriptors, as grpcurl does",
    ),
)


def check_security(config: ServerConfig) -> None:
    """ConfigError for options that contradict each other."""
    if (config.tls_certificate is None) != (config.tls_key is None):
        given, missing = (
            ("tls-certificate", "tls-key") if config.tls_key is None else ("tls-key", "tls-certificate")
        )
        raise ConfigError(
            f"{given} is {str(config.tls_certificate or config.tls_key)!r}, but there is no {missing}: give both or neither"
        )
    if config.tls_client_ca is not None and config.tls_certificate is None:
        raise ConfigError(
            f"tls-client-ca is {str(config.tls_client_ca)!r}, but the port is not TLS; give --tls-certificate and --tls-key"
        )
    if config.auth_certificates is not None and config.tls_client_ca is None:
        raise ConfigError(
            f"auth-certificates is {str(config.auth_certificates)!r}, but clients are not asked for certificates; say "
            "whose are taken: --tls-client-ca FILE"
        )
    plaintext = config.auth_tokens is not None and config.tls_certificate is None
    if plaintext and not config.auth_over_plaintext and not _is_loopback(config.host):
        raise ConfigError(
            f"auth-tokens is {str(config.auth_tokens)!r}, and host {config.host!r}: whoever is on the network between would "
            "read the tokens; give --tls-certificate and --tls-key, or --auth-over-plaintext where a proxy ends TLS"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
