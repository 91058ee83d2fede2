"""Why a model does not serve, for callers that may not control models: without paths of the server's files."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

_HIDDEN = "..."
# An absolute path, up to what ends it in a sentence.
_PATH = re.compile(r"(?<![\w./-])/[^\s'\"`,:;()\[\]]+")


def without_paths(reason: str, roots: Iterable[Path]) -> str:
    """The reason with paths below the roots as relative ones, and no other absolute path."""
    known = {str(path) for root in (*roots, Path(tempfile.gettempdir())) for path in (root, root.absolute())}
    # The longest first, since one may contain another. A space in a path would end the pattern above.
    for root in sorted(known, key=len, reverse=True):
        if root.startswith("/") and root != "/":
            reason = reason.replace(f"{root}/", "").replace(root, _HIDDEN)
    return _PATH.sub(_HIDDEN, reason)
