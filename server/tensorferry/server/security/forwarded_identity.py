"""The identity of a client between the processes of one server."""

from __future__ import annotations

import json
from collections.abc import Callable

from tensorferry.server.identity import ClientIdentity, Metadata
from tensorferry.server.security.access_control import ClientCertificate

# Binary metadata, because the name of a client may have any character.
_KEY = "tensorferry-client-bin"


def forwarded(client: ClientIdentity) -> tuple[tuple[str, str | bytes], ...]:
    """Return the metadata that tells the engine who the client is."""
    return ((_KEY, json.dumps([client.name, sorted(client.roles)]).encode()),)


class ForwardedIdentity:
    """Identification of clients by the front-end that passes a call on. It stands in for `AccessControl` in the engine.

    Only front-ends can connect to the engine's socket, and they have checked the call.
    """

    def open(self) -> None:
        """Do nothing: there are no files."""

    def admit(
        self,
        role: str,
        metadata: Metadata,
        peer: Callable[[], str],
        certificate: Callable[[], ClientCertificate],
    ) -> ClientIdentity:
        """Return the client that the front-end names."""
        name, roles = json.loads(dict(metadata)[_KEY])
        return ClientIdentity(name, frozenset(roles))
