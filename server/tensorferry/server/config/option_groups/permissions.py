"""Options that decide what clients may do, and which statuses they get."""

from __future__ import annotations

from dataclasses import dataclass

from tensorferry.server.config.option import OptionScope, option
from tensorferry.server.config.parsers import switch


@dataclass(frozen=True, kw_only=True)
class PermissionOptions:
    """Options that decide what clients may do, and which statuses they get."""

    allow_shared_memory: bool = option(
        False,
        switch,
        "allow clients to register POSIX shared memory that this process can open, and device memory that another "
        "process exports, and to keep tensors there",
        scope=OptionScope.STANDALONE,
    )
    allow_log_settings: bool = option(
        False,
        switch,
        "allow clients to change what is logged, by LogSettings; reading the settings is always allowed",
        scope=OptionScope.STANDALONE,
    )
    triton_status_codes: bool = option(
        False,
        switch,
        "return UNAVAILABLE, as Triton does, when a queue is full or a deadline passes",
    )
