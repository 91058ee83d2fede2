"""Addresses to listen on, as text and in errors."""

from __future__ import annotations

from tensorferry.server.errors import StartError


def address_of(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def cannot_listen(address: str, reason: object) -> StartError:
    """Return the error for an address that cannot be listened on."""
    return StartError(
        f"cannot listen on {address}: the address is in use, or is not an address of this machine ({reason}); "
        "choose others by --host and --port (0 picks a free port)"
    )
