"""What grpc's core reads from the environment when it is loaded."""

from __future__ import annotations

import os

# With it, a pool of core's threads reads the sockets and hands every event over to the one that polls:
# on one core a bare echo then took 53 to 76 us of CPU a call, without it 36 to 53.
_LISTENER = "event_engine_listener"


# What core itself logs as errors are clients' faults, mostly: a header that it cannot parse is a line, by which any
# client could fill the log. What the server must know of core's, grpcio raises.
_VERBOSITY = "GRPC_VERBOSITY"


def prepare() -> None:
    """Lets the thread that polls read the sockets too, and core be silent. Before grpc is imported; what the user
    says stands.
    """
    os.environ.setdefault(_VERBOSITY, "NONE")
    experiments = os.environ.get("GRPC_EXPERIMENTS", "")
    if _LISTENER not in experiments:
        os.environ["GRPC_EXPERIMENTS"] = ",".join(filter(None, [experiments, f"-{_LISTENER}"]))
