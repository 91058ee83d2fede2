"""Versions and settings of gRPC core that keep the file descriptors of some connections after their end."""

from __future__ import annotations

import re

_CURED = (1, 80)
_LEGACY_LISTENER = "-event_engine_listener"


def warning_of(version: str, experiments: str, max_connection_age: float) -> str | None:
    """Return the log line for an operator whose core keeps files of connections that clients reset just after their SETTINGS.

    None if it keeps none, or closes them at a `max_connection_age` other than 0. `version` is grpcio's, `experiments` the
    value of GRPC_EXPERIMENTS.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if max_connection_age:
        return None
    if _LEGACY_LISTENER in experiments.split(","):
        cause, cure = f"GRPC_EXPERIMENTS={experiments}", f"remove {_LEGACY_LISTENER} from it"
    elif match is not None and (int(match[1]), int(match[2])) < _CURED:
        cause, cure = f"grpcio {version}", "install grpcio 1.80 or newer"
    else:
        return None
    return (
        f"{cause} keeps a file open for ever for some connections that are reset early, and each counts for "
        f"--max-connections; {cure}, or set --max-connection-age-seconds, at which core closes them"
    )
