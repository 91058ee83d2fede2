"""A model's files that a client sent, kept on disk while they are in use."""

from __future__ import annotations

from collections.abc import Mapping

from tensorferry.server.system.scratch_directory import ScratchDirectory


class UploadedFiles:
    """A model's files in a temporary directory, which is deleted with this object. OSError if they cannot be stored.

    The keys of `files` are paths relative to the model's directory.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self._scratch = ScratchDirectory()
        self.directory = self._scratch.path
        for file, content in files.items():
            path = self.directory / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
