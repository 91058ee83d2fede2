"""The link between a front-end process and the engine: requests and responses through shared memory."""

from tensorferry.server.link.engine import EngineLink, Submitted, Taken
from tensorferry.server.link.errors import LinkBroken, LinkClosed, LinkError, LinkFull
from tensorferry.server.link.files import LinkFiles, create_link
from tensorferry.server.link.front_end import FrontEndLink, Response
from tensorferry.server.link.layout import ALIGNMENT

__all__ = [
    "ALIGNMENT",
    "EngineLink",
    "FrontEndLink",
    "LinkBroken",
    "LinkClosed",
    "LinkError",
    "LinkFiles",
    "LinkFull",
    "Response",
    "Submitted",
    "Taken",
    "create_link",
]
