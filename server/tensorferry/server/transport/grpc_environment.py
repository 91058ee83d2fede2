"""Settings that grpc's core reads from the environment when it is loaded."""

from __future__ import annotations

import os

# Core logs clients' faults as errors, for instance a header that it cannot parse, so that any client could fill the
# log. What the server must know of core's errors, grpcio raises.
_VERBOSITY = "GRPC_VERBOSITY"


def prepare() -> None:
    """Keep core silent, unless the user has set its verbosity. Call this before grpc is imported."""
    os.environ.setdefault(_VERBOSITY, "NONE")
