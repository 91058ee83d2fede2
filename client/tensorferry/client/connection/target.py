"""Addresses of servers, checked before gRPC resolves them."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from urllib.parse import unquote

from tensorferry.client.errors import InvalidInput
from tensorferry.client.messages.arguments import shown

# Target of clients and commands that name none.
TARGET_VARIABLE = "TENSORFERRY_TARGET"
_EXPECTED = "'host:port'"
# Schemes that gRPC core resolves, with and without a port.
_WITH_PORTS = ("dns", "ipv4", "ipv6")
_WITHOUT_PORTS = ("unix", "unix-abstract", "vsock", "xds", "google-c2p")
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/?#@,\[\]]+):([0-9]{1,5})", re.ASCII)
# Address of a server with its default options, and the example in error messages.
DEFAULT_TARGET = "127.0.0.1:8001"
# Longest target in characters. A list may have thousands of addresses.
_LONGEST = 100_000
# Longest part of a target in an error message, in characters.
_SHOWN = 200


def _targets_of_environment() -> tuple[str, ...]:
    # Commas separate targets. An empty variable counts as unset.
    text = os.environ.get(TARGET_VARIABLE)
    if not text:
        return (DEFAULT_TARGET,)
    # In a target with a scheme, commas separate its addresses.
    has_scheme = text.partition(":")[0] in _WITH_PORTS + _WITHOUT_PORTS
    try:
        return targets_of(text if has_scheme else [one.strip() for one in text.split(",")])
    except InvalidInput as error:
        raise InvalidInput(
            f"the environment variable {TARGET_VARIABLE}", error.expected, error.received, error.change
        ) from None


def targets_of(target: object) -> tuple[str, ...]:
    """Return the targets of a client: one or several given. None takes those of TENSORFERRY_TARGET, or the default.

    Raises InvalidInput with a correction if gRPC could never reach one of them.
    """
    if target is None:
        return _targets_of_environment()
    if not isinstance(target, (list, tuple)):
        return (check_target(target),)
    if not target:
        expected = f"{_EXPECTED}, or a list of them"
        raise InvalidInput(
            "target", expected, "an empty list", f"write ['{DEFAULT_TARGET}'], or leave it out"
        )
    return tuple(check_target(one) for one in target)


def address_list(targets: Sequence[str]) -> str | None:
    """Return one target of gRPC with all addresses, None if one of the targets is no IP address."""
    addresses: list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, str]] = []
    for target in targets:
        host, _, port = target.rpartition(":")
        try:
            addresses.append((ipaddress.ip_address(host.strip("[]")), port))
        except ValueError:
            return None
    if all(address.version == 4 for address, _ in addresses):
        return "ipv4:" + ",".join(f"{address}:{port}" for address, port in addresses)
    # gRPC takes IPv4 addresses in a list of IPv6 addresses in their mapped form.
    mapped = (
        (f"::ffff:{address}" if address.version == 4 else str(address), port) for address, port in addresses
    )
    return "ipv6:" + ",".join(f"[{address}]:{port}" for address, port in mapped)


def check_target(target: object) -> str:
    """Return the target; raise InvalidInput with a correction if gRPC could never reach it."""
    if isinstance(target, bytes):
        raise _refused(target, f"write {target.decode(errors='replace')!r}")
    if not isinstance(target, str) or not 0 < len(target) <= _LONGEST or not target.strip().isprintable():
        raise _refused(target, f"write the server's address, such as '{DEFAULT_TARGET}'")
    if target != target.strip():
        raise _refused(target, f"write '{target.strip() or DEFAULT_TARGET}'")
    scheme, colon, rest = target.partition(":")
    if colon and scheme in _WITHOUT_PORTS:
        if not rest.strip("/"):
            raise _refused(target, f"name what is behind '{scheme}:', such as 'unix:/run/tensorferry.sock'")
        return target
    if "://" in target and scheme not in _WITH_PORTS:
        secure = scheme.lower() in ("https", "grpcs")
        address = re.split(r"[/?#]", target.partition("://")[2])[0].rpartition("@")[2]
        tls = ", with tls=True (--tls)" if secure else ""
        raise _refused(target, f"write '{_with_port(address)}'{tls}")
    if colon and scheme in _WITH_PORTS and not rest.isdecimal():
        # Brackets of IPv6 addresses may be percent-encoded.
        addresses = unquote(re.sub(r"^//[^/]*/", "", rest)).split(",")
        for address in addresses:
            _check_address(target, address, scheme)
        return target
    _check_address(target, target)
    return target


def _check_address(target: str, address: str, scheme: str = "") -> None:
    found = _HOST_PORT.fullmatch(address)
    if found is None or not 0 < int(found[2]) < 1 << 16:
        prefix = f"{scheme}:" if scheme else ""
        raise _refused(target, f"write '{prefix}{_with_port(address)}'")
    host = found[1].strip("[]")
    looks_v4 = re.fullmatch(r"[0-9.]+", host) is not None
    if looks_v4 or found[1].startswith("[") or scheme in ("ipv4", "ipv6"):
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise _refused(
                target, f"{host!r} is no IP address; write one such as '{DEFAULT_TARGET}'"
            ) from None


def _with_port(address: str) -> str:
    """Return the address with a valid host and port, guessed from what was given."""
    try:
        if ipaddress.ip_address(address.strip("[]")).version == 6:
            return f"[{address.strip('[]')}]:8001"
    except ValueError:
        pass
    host, colon, port = address.partition(":")
    if not colon:
        host, port = address, ""
    host = re.split(r"[\s/?#@,]", host)[0]
    port = re.split(r"[\s/?#@,]", port)[0]
    number = port if port.isdecimal() and port.isascii() and 0 < int(port[:6]) < 1 << 16 else "8001"
    return f"{host or '127.0.0.1'}:{number}"


def _refused(target: object, change: str) -> InvalidInput:
    received = repr(target) if isinstance(target, str) and len(target) < _SHOWN else shown(target)
    if len(change) > 2 * _SHOWN:
        change = f"write an address such as '{DEFAULT_TARGET}'"
    return InvalidInput("target", _EXPECTED, received, change)
