"""Who may call, for every method and both transports.

Where the server asks nobody there is no `Access` at all, and every call is `ANYONE`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from tensorferry.server.caller import ROLES, Caller
from tensorferry.server.inference import Metadata

# What TLS found out of a connection, by grpc's names: of each all values, as bytes.
Certificate = Mapping[str, Any]


class Access:
    """Tells of a call whose it is. Thread-safe.

    Asked once for each call, a stream being one. Peer and certificate are functions, since it takes a while to
    find them out.
    """

    def admit(
        self,
        role: str,
        metadata: Metadata,
        peer: Callable[[], str],
        certificate: Callable[[], Certificate],
    ) -> Caller:
        """Who calls a method that wants this role; a `ServerError` that says why it must not."""
        return Caller(address_of(peer()), ROLES)


def address_of(peer: str) -> str:
    """The address in grpc's name of a peer, without the port, which is another for each connection."""
    kind, _, address = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        # Sockets of the file system, whose clients have no names.
        return kind
    return address.rpartition(":")[0].strip("[]")
