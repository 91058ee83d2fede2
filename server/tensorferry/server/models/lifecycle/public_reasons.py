"""Reasons why a model does not serve, without paths of the server, for callers that may not control models."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

_HIDDEN = "..."
# An absolute path, up to the character that ends it in a sentence.
_PATH = re.compile(r"(?<![\w./-])/[^\s'\"`,:;()\[\]]+")


def without_paths(reason: str, roots: Iterable[Path]) -> str:
    """Return the reason with paths below the roots made relative, and other absolute paths hidden."""
    known = {str(path) for root in (*roots, Path(tempfile.gettempdir())) for path in (root, root.absolute())}
    # The longest root first, because one may contain another. Roots may contain spaces, which end the pattern above.
    for root in sorted(known, key=len, reverse=True):
        if root.startswith("/") and root != "/":
            reason = reason.replace(f"{root}/", "").replace(root, _HIDDEN)
    return _PATH.sub(_HIDDEN, reason)
