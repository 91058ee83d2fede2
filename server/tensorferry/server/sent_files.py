"""A model's files as a client sent them, kept on disk for as long as something is made of them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp


class SentFiles:
    """The files of a model, by their paths below its directory, in a folder that goes when nobody has this any more.

    OSError where they cannot be kept.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self.directory = Path(mkdtemp(prefix="tensorferry-"))
        weakref.finalize(self, rmtree, self.directory, ignore_errors=True)
        for file, content in files.items():
            path = self.directory / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
