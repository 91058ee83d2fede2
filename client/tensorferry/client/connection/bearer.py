"""Bearer token of a client, and the check that it is sent only where it stays secret."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from tensorferry.client.connection.channel import CallMetadata
from tensorferry.client.errors import InvalidInput

# Printable ASCII without blanks, as in an HTTP header (RFC 6750 allows fewer characters).
_TOKEN = re.compile(r"[\x21-\x7e]+")


def bearer(token: str | None, targets: Sequence[str], *, secure: bool, over_plaintext: bool) -> CallMetadata:
    """Return the metadata with the token.

    Raises InvalidInput for a malformed token, and if others on the network could read it.
    """
    if token is None:
        return ()
    # The message does not quote the token, because it is a secret.
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        received = f"a {type(token).__name__}"
        if isinstance(token, str):
            received = (
                f"{len(token)} characters, with blanks, line ends or others that are not printable ASCII"
            )
        raise InvalidInput("token", "a str of printable ASCII", received, "give the token alone")
    remote = None if secure or over_plaintext else next((t for t in targets if not _is_local(t)), None)
    if remote is not None:
        raise InvalidInput(
            "token",
            "a connection that others cannot read",
            f"{remote} in plain text",
            "use TLS (tls=True, or --tls), or allow it (token_over_plaintext=True, or --token-over-plaintext)",
        )
    return (("authorization", f"Bearer {token}"),)


def _is_local(target: str) -> bool:
    """Return whether the target is on this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    # Remove gRPC's resolver prefix, as in dns:///host:port or ipv4:address:port,address:port. A DNS server in it,
    # as in dns://server/host:port, may resolve any name to any address.
    address = re.sub(r"^(?:dns:(?:///)?|ipv[46]:)", "", target)
    return all(_is_local_host(one) for one in address.split(","))


def _is_local_host(address: str) -> bool:
    bracketed = re.fullmatch(r"\[(.*)\](?::\d+)?", address)
    host = bracketed[1] if bracketed else address.rpartition(":")[0] if address.count(":") == 1 else address
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
