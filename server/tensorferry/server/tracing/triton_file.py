"""Trace files: JSON arrays in Triton's format, written by a background thread."""

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

# Limit of queued traces. Further traces are dropped.
_MAX_QUEUED = 10_000
_END = b"\n]"


class TraceFileSeries:
    """Files for the traces of one setting. Used by the writer's thread only.

    `traces` is the number of traces per numbered file (0: no limit). With None, traces go to the unnumbered file.
    """

    __slots__ = ("path", "traces", "written")

    def __init__(self, traces: int | None) -> None:
        self.traces = traces
        self.path: Path | None = None
        self.written = 0


_Item: TypeAlias = "tuple[TraceFileSeries, Sequence[Mapping[str, Any]]]"


class TraceFile:
    """Trace file at `path`, and numbered files next to it. `write` is thread-safe.

    The first trace empties a file. After each write the file is a complete JSON array.
    """

    def __init__(self, path: Path, backoff: RestartBackoff | None = None) -> None:
        self.path = path
        self._writer: BackgroundWriter[_Item] = BackgroundWriter(
            "trace-writer", self._write, max_items=_MAX_QUEUED, backoff=backoff
        )
        # Guards _lost. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._lost = 0
        # The fields below are used by the writer's thread only.
        # Size in bytes of each file's array after the last write.
        self._sizes: dict[Path, int] = {}
        self._next_number = 0
        self._failing = False

    def start(self) -> None:
        """Start the writer. StartError if no file can be created."""
        folder = self.path.parent
        if self.path.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise StartError(
                f"--trace-file is {str(self.path)!r}; it must name a file in an existing, writable directory"
            )
        self._writer.start()

    def write(self, series: TraceFileSeries, *trace: Mapping[str, Any]) -> None:
        """Queue a request's trace: its record, and those of its stages, which count as one trace.

        Never waits: if the queue is full, the trace is lost and a later line reports it.
        """
        if not self._writer.put((series, trace)):
            with self._lock:
                self._lost += 1

    def stop(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for all traces to be written. Return whether they are. Idempotent."""
        return self._writer.stop(timeout)

    def _write(self, items: Sequence[_Item]) -> None:
        texts: dict[Path, list[str]] = {}
        for series, trace in items:
            texts.setdefault(self._path_for(series), []).extend(map(json.dumps, trace))
        with self._lock:
            lost, self._lost = self._lost, 0
        if lost:
            _log.warning("%d traces are lost: the queue of %d traces was full", lost, _MAX_QUEUED)
        try:
            for path, lines in texts.items():
                self._append(path, ",\n".join(lines).encode())
            self._failing = False
        except OSError as error:
            if not self._failing:
                _log.error("traces cannot be written and are lost: %s", error)
            self._failing = True

    def _path_for(self, series: TraceFileSeries) -> Path:
        if series.traces is None:
            return self.path
        if series.path is None or (series.traces and series.written == series.traces):
            series.path = self.path.with_name(f"{self.path.name}.{self._next_number}")
            series.written = 0
            self._next_number += 1
        series.written += 1
        return series.path

    def _append(self, path: Path, lines: bytes) -> None:
        """Append traces to the array in a file. After an OSError the array is unchanged, or the file is started again."""
        size = self._sizes.pop(path, 0)
        if not size or not path.exists() or path.stat().st_size < size:
            # The first write, or log rotation has moved or truncated the file.
            self._sizes[path] = path.write_bytes(b"[\n" + lines + _END)
            return
        with path.open("r+b", buffering=0) as file:
            try:
                _write_at(file, size - len(_END), b",\n" + lines + _END)
            except OSError:
                # The disk may be full. The old end of the array is restored, so that later traces can be appended.
                _write_at(file, size - len(_END), _END)
                self._sizes[path] = size
                raise
            self._sizes[path] = file.tell()


def _write_at(file: FileIO, position: int, data: bytes) -> None:
    """Replace the content of an unbuffered file from `position` on."""
    file.truncate(position)
    file.seek(position)
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
