"""Record of a model's files, by which a later look finds that one was replaced or written to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tensorferry.server.onnx.graph.model_file import FileStatus, external_files, status_if_any


class FileRecord:
    """Inode, time and size of a model's file, of its external data and of `others`, as this object's creation found them.

    Immutable. A missing file is recorded as missing. Links are followed, so a link to another file is a change.
    """

    def __init__(self, path: Path, others: Iterable[Path] = ()) -> None:
        # The status first, so that a change while the file is read is found.
        self._found: dict[Path, FileStatus | None] = {path: status_if_any(path)}
        names: Iterable[str] = ()
        with suppress(OSError):
            names = external_files(path)
        for each in (*(path.parent / name for name in names), *others):
            self._found[each] = status_if_any(each)

    @property
    def paths(self) -> Sequence[Path]:
        """The model's file, and the others that were there."""
        own, *others = self._found
        return [own, *(path for path in others if self._found[path] is not None)]

    def has_changed(self) -> bool:
        """Return whether a file was replaced, written to or removed since this object was made."""
        return any(status_if_any(path) != found for path, found in self._found.items())
