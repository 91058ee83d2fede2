"""Identity of clients: the name and the roles that a token, certificate or address stands for."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

# Metadata of a call: lower-case names with text, or with bytes if the name ends in -bin.
Metadata = Sequence[tuple[str, str | bytes]]

# The role to send requests, and to read metadata, configuration and statistics.
INFER = "infer"
# The role to change the state of the server: models, shared memory, log and trace settings.
CONTROL = "control"

ROLES = frozenset({INFER, CONTROL})


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """The name and the roles of a client."""

    name: str
    roles: frozenset[str]


# Every client, if the server does not identify clients.
ANONYMOUS = ClientIdentity("anyone", ROLES)

# The client of the unary method, other than ModelInfer, that runs in this context.
CURRENT_CLIENT: ContextVar[ClientIdentity] = ContextVar("tensorferry_caller", default=ANONYMOUS)
