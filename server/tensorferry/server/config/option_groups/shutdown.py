"""Options of an orderly shutdown."""

from __future__ import annotations

from dataclasses import dataclass

from tensorferry.server.config.option import OptionScope, option
from tensorferry.server.config.parsers import seconds


@dataclass(frozen=True, kw_only=True)
class ShutdownOptions:
    """Options of an orderly shutdown."""

    drain_seconds: float = option(
        30.0, seconds, "longest time after SIGTERM or Ctrl-C for accepted requests to finish"
    )
    drain_delay: float = option(
        0.0,
        seconds,
        "time after SIGTERM or Ctrl-C in which requests are still accepted while health is NOT_SERVING and the port is "
        "closed to new connections, so that load balancers notice and no call fails; --drain-seconds begin afterwards",
        flag="drain-delay-seconds",
        scope=OptionScope.STANDALONE,
    )
