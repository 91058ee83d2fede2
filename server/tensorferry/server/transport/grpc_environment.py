"""Environment variables that gRPC core reads when it is loaded."""

from __future__ import annotations

import os

# Core logs clients' mistakes as errors, for instance a header that it cannot parse, so any client could fill the log.
# grpcio raises the errors of core that the server must handle.
_VERBOSITY = "GRPC_VERBOSITY"


def prepare() -> None:
    """Keep core silent unless the operator has set its verbosity. Call this before grpc is imported."""
    os.environ.setdefault(_VERBOSITY, "NONE")
