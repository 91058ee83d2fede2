"""Addresses to listen on: their text and errors, and listening sockets."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from tensorferry.server.errors import StartError

# Connections that wait to be accepted, for example while a process restarts.
_BACKLOG = 128


def address_of(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def names_this_machine(host: str) -> bool:
    """Return whether a Host header names the local machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def cannot_listen(address: str, reason: object) -> StartError:
    """Return the error for an address that cannot be listened on."""
    return StartError(
        f"cannot listen on {address}: the address is in use, or is not an address of this machine ({reason}); "
        "choose others by --host and --port (0 picks a free port)"
    )


def listen_for_metrics(host: str, port: int) -> socket.socket:
    """Return the listening socket of --metrics-host and --metrics-port; StartError if the address cannot be used."""
    return _listen(host, port, "metrics", "--metrics-host and --metrics-port")


def listen_for_http(host: str, port: int) -> socket.socket:
    """Return the listening socket of --host and --http-port; StartError if the address cannot be used."""
    return _listen(host, port, "HTTP", "--host and --http-port")


def _listen(host: str, port: int, what: str, options: str) -> socket.socket:
    bare = host.strip("[]")
    try:
        family = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0][0]
        # With the protocol's number, because without it asyncio does not set TCP_NODELAY. The end of a large answer, and each
        # event of a stream, would then wait for the client's delayed acknowledgement, about 40 ms.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            # Connections of an earlier server that are in TIME_WAIT do not matter.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((bare, port))
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:
        # UnicodeError for a name that no host can have, such as 127..0.1.
        raise StartError(
            f"cannot serve {what} on {host} port {port}: {error}; choose others by {options} (0 picks a free port)"
        ) from None
    return listening
