"""A model's files as a client sent them, kept on disk for as long as something is made of them."""

from __future__ import annotations

from collections.abc import Mapping

from tensorferry.server.runtime.scratch_directory import ScratchDirectory


class UploadedFiles:
    """The files of a model, by their paths below its directory, in a folder that goes when nothing refers to this.

    OSError where they cannot be kept.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self._scratch = ScratchDirectory()
        self.directory = self._scratch.path
        for file, content in files.items():
            path = self.directory / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
