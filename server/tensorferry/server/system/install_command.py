"""Commands that install what an optional part needs."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the folder that this package was installed from, if it is there.

    The metadata of an installation from a folder has its URL (PEP 610).
    """
    return f"pip install '{_source() or 'tensorferry'}[{extra}]'"


def _source() -> str:
    try:
        text = distribution("tensorferry").read_text("direct_url.json")
    except PackageNotFoundError:
        return ""
    if not text:
        return ""
    url = urlsplit(str(json.loads(text).get("url", "")))
    return unquote(url.path) if url.scheme == "file" else ""
