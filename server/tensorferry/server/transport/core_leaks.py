"""Versions and settings of gRPC core that keep the file descriptors of some connections after their end."""

from __future__ import annotations

import re

_CURED = (1, 80)
_LEGACY_LISTENER = "-event_engine_listener"


def leaks_files(version: str, experiments: str) -> bool:
    """Return whether core keeps files of connections that clients reset just after their SETTINGS.

    `version` is grpcio's, `experiments` the value of GRPC_EXPERIMENTS.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    old = match is not None and (int(match[1]), int(match[2])) < _CURED
    return old or _LEGACY_LISTENER in experiments.split(",")


def warning_of(version: str, experiments: str, max_connection_age: float) -> str | None:
    """Return the log line for an operator whose grpcio leaks files; None if it does not.

    With a `max_connection_age` other than 0, core closes these connections at that age, too.
    """
    if max_connection_age or not leaks_files(version, experiments):
        return None
    if _LEGACY_LISTENER in experiments.split(","):
        cause, cure = f"GRPC_EXPERIMENTS={experiments}", f"remove {_LEGACY_LISTENER} from it"
    else:
        cause, cure = f"grpcio {version}", "install grpcio 1.80 or newer"
    return (
        f"{cause} keeps a file open for ever for some connections that are reset early, and each counts for "
        f"--max-connections; {cure}, or set --max-connection-age-seconds, at which core closes them"
    )
