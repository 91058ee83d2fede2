"""Option of the cache of answers."""

from __future__ import annotations

from dataclasses import dataclass

from tensorferry.server.config.option import option
from tensorferry.server.config.parsers import size


@dataclass(frozen=True, kw_only=True)
class CachingOptions:
    """Option of the cache of answers."""

    cache: int = option(
        0,
        size(least=0),
        "most bytes of answers that are kept for each model, so that equal requests are not run again; 0: none",
        per_model=True,
    )
