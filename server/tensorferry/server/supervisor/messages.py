"""Checks of what children send. The supervisor trusts none of it, because a front-end is exposed to the network."""

from __future__ import annotations

from typing import Any

# Of the hash of a refused request.
_MOST_DIGEST_CHARACTERS = 64


def is_health(fields: dict[str, Any]) -> bool:
    """Return whether these are the fields of `health`."""
    match fields:
        case {"serving": dict(serving), "ready": bool(), "loaded": bool(), **rest} if not rest:
            return all(isinstance(value, bool) for value in serving.values())
    return False


def is_count(fields: dict[str, Any]) -> bool:
    """Return whether these are the fields of `suspects`."""
    match fields:
        case {"count": int(count), **rest} if not rest:
            return count >= 0
    return False


def is_refusal(fields: dict[str, Any]) -> bool:
    """Return whether these are the fields of `refuse`."""
    match fields:
        case {"digest": str(digest), "until": float(), **rest} if not rest:
            return len(digest) <= _MOST_DIGEST_CHARACTERS
    return False
