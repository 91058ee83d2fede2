"""What can go wrong on a link."""

from __future__ import annotations

from typing import Literal


class LinkError(Exception):
    """A link cannot be used. The message says why."""


class LinkClosed(LinkError):
    """The link was closed by this process."""


class LinkBroken(LinkError):
    """The other process violated the protocol of the link. The link must be closed."""


class LinkFull(LinkError):
    """A request finds no room. `what` is "slots", "bytes", or "size" for a message that never fits."""

    def __init__(self, what: Literal["slots", "bytes", "size"], message: str) -> None:
        super().__init__(message)
        self.what: Literal["slots", "bytes", "size"] = what
