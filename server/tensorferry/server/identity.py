"""Who calls: what a transport finds out of a call's token, certificate or address, and the service goes by."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

# What a call brought along with its message: names in lower case, text or bytes (names in -bin).
Metadata = Sequence[tuple[str, str | bytes]]


# May send requests, and read what the models are and do.
INFER = "infer"
# May change what the server does: its models, its shared memory, its log and its traces.
CONTROL = "control"

ROLES = frozenset({INFER, CONTROL})


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """A client, by the name that it is known by, and what it may do."""

    name: str
    roles: frozenset[str]


# Where nothing asks who calls.
ANONYMOUS = ClientIdentity("anyone", ROLES)

# While a unary method other than ModelInfer runs: who calls it.
CURRENT_CLIENT: ContextVar[ClientIdentity] = ContextVar("tensorferry_caller", default=ANONYMOUS)
