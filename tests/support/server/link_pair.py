"""Both sides of a link in one process."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import contextmanager

from tensorferry.server.link import EngineLink, FrontEndLink, LinkFiles, Response, create_link

NO_ROOM = (8, b"no room")


class Pair:
    """A front-end and an engine, and the files of their link."""

    def __init__(
        self,
        slots: int = 8,
        request_bytes: int = 1 << 20,
        response_bytes: int = 1 << 20,
        keep_bytes: int = 1 << 20,
    ) -> None:
        self.files: LinkFiles = create_link(slots, request_bytes, response_bytes)
        self.front_end = FrontEndLink(self.files.duplicate(), keep_bytes=keep_bytes)
        self.engine = EngineLink(self.files.duplicate(), no_room=NO_ROOM, keep_bytes=keep_bytes)

    def round_trip(
        self, message: bytes, payload: bytes, code: int = 0, extra: bytes = b""
    ) -> tuple[bytes, Response]:
        """Send one request and its response. Return the message that arrived, and the response."""
        self.front_end.submit(message, extra=extra)
        self.front_end.flush()
        ((ticket, arrived, _, beside),) = self.engine.take().submitted
        assert beside == extra
        self.engine.respond(ticket, code, [payload])
        self.engine.flush()
        (response,) = self.front_end.receive()
        return arrived, response

    def readable(self) -> bool:
        """Whether `receive` would return at once."""
        return bool(select.select([self.files.to_front_end], [], [], 0)[0])

    def close(self) -> None:
        """Close both sides and the files."""
        self.engine.close()
        self.front_end.release()
        self.files.close()


@contextmanager
def pair(
    slots: int = 8, request_bytes: int = 1 << 20, response_bytes: int = 1 << 20, keep_bytes: int = 1 << 20
) -> Iterator[Pair]:
    """Both sides of a link, closed at the end."""
    both = Pair(slots, request_bytes, response_bytes, keep_bytes)
    try:
        yield both
    finally:
        both.close()
