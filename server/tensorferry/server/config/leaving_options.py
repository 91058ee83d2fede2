"""The options that say how clients are led elsewhere before the server leaves them."""

from __future__ import annotations

from tensorferry.server.config.option_types import SECONDS, Option, seconds

LEAVING_OPTIONS: tuple[Option, ...] = (
    Option(
        "drain-delay-seconds",
        "drain_delay",
        seconds,
        SECONDS,
        "how long after SIGTERM or Ctrl-C requests are still accepted while health is NOT_SERVING and the port is "
        "closed to new connections, so that balancers learn of it and no call fails; then --drain-seconds begin",
    ),
    Option(
        "max-connection-age-seconds",
        "max_connection_age",
        seconds,
        SECONDS,
        "how long, within 10 percent, before a client is asked to connect anew, its calls go on meanwhile; so that clients "
        "without health checking spread over new servers and leave old ones; 0: never",
    ),
)
