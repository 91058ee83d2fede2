"""Traces in files: JSON arrays in Triton's format, written by a thread of their own."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

from tensorferry.batcher.supervision import RestartBackoff
from tensorferry.server.errors import StartError
from tensorferry.server.telemetry.log_writer import BackgroundWriter

_log = logging.getLogger("tensorferry.server")

# Traces that wait to be written; more are dropped rather than held, or waited for.
_MOST_WAITING = 10_000
_END = b"\n]"


class TraceFileSeries:
    """Where the traces of one setting go, in the writer's hands.

    `traces` is how many have a numbered file together, 0 for any number; None is for the file itself.
    """

    __slots__ = ("path", "traces", "written")

    def __init__(self, traces: int | None) -> None:
        self.traces = traces
        self.path: Path | None = None
        self.written = 0


_Item: TypeAlias = "tuple[TraceFileSeries, Mapping[str, Any]]"


class TraceFile:
    """Writes traces to `path`, and to numbered files beside it. `write` may be called by any thread.

    A file is emptied when the first trace is written to it, and is a whole JSON array after each.
    """

    def __init__(self, path: Path, backoff: RestartBackoff | None = None) -> None:
        self.path = path
        self._writer: BackgroundWriter[_Item] = BackgroundWriter(
            "trace-writer", self._write, _failed, most=_MOST_WAITING, backoff=backoff
        )
        # Guards _lost. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._lost = 0
        # The rest is the writer's alone.
        # By file, the bytes of the whole array that was last written to it.
        self._sizes: dict[Path, int] = {}
        self._next_number = 0
        self._failing = False

    def start(self) -> None:
        """Starts the writer. StartError where no file can be made."""
        folder = self.path.parent
        if self.path.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise StartError(
                f"--trace-file is {str(self.path)!r}; it must name a file in a directory that is there and can be "
                "written to"
            )
        self._writer.start()

    def write(self, sheet: TraceFileSeries, trace: Mapping[str, Any]) -> None:
        """Has a trace written soon; never waits. One that comes while too many wait is lost, which is logged."""
        if not self._writer.put((sheet, trace)):
            with self._lock:
                self._lost += 1

    def stop(self, timeout: float) -> bool:
        """Whether all is written, for which it waits at most so long. Idempotent; nothing may be written afterwards."""
        return self._writer.stop(timeout)

    def _write(self, items: Sequence[_Item]) -> None:
        texts: dict[Path, list[str]] = {}
        for sheet, trace in items:
            texts.setdefault(self._path_for(sheet), []).append(json.dumps(trace))
        with self._lock:
            lost, self._lost = self._lost, 0
        if lost:
            _log.warning("%d traces are lost: %d others were waiting to be written", lost, _MOST_WAITING)
        try:
            for path, lines in texts.items():
                self._append(path, ",\n".join(lines).encode())
            self._failing = False
        except OSError as error:
            if not self._failing:
                _log.error("traces are lost, and those that follow may be: %s", error)
            self._failing = True

    def _path_for(self, sheet: TraceFileSeries) -> Path:
        if sheet.traces is None:
            return self.path
        if sheet.path is None or (sheet.traces and sheet.written == sheet.traces):
            sheet.path = self.path.with_name(f"{self.path.name}.{self._next_number}")
            sheet.written = 0
            self._next_number += 1
        sheet.written += 1
        return sheet.path

    def _append(self, path: Path, lines: bytes) -> None:
        """Add traces to the array in a file. OSError leaves the array as it was, or the file to be begun again."""
        size = self._sizes.pop(path, 0)
        if not size or not path.exists() or path.stat().st_size < size:
            # Log rotation may move a file away or truncate it.
            self._sizes[path] = path.write_bytes(b"[\n" + lines + _END)
            return
        with path.open("r+b", buffering=0) as file:
            try:
                _write_at(file, size - len(_END), b",\n" + lines + _END)
            except OSError:
                # The disk may be full: the array ends again where it ended, so that later traces can follow it.
                _write_at(file, size - len(_END), _END)
                self._sizes[path] = size
                raise
            self._sizes[path] = file.tell()


def _failed(fault: BaseException) -> None:
    _log.error("the thread that writes traces ended unexpectedly; some are lost", exc_info=fault)


def _write_at(file: FileIO, position: int, data: bytes) -> None:
    """Make `data` the end of an unbuffered file, from `position` on."""
    file.truncate(position)
    file.seek(position)
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
