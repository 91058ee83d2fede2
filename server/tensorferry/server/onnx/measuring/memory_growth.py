"""Memory that a process or a GPU uses beyond what it used at a start."""

from __future__ import annotations

from pathlib import Path

from tensorferry.server.runtime.gpu.gpu_readings import GpuReader
from tensorferry.server.runtime.host_memory import resident_bytes

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
# Linux then sets the peak to the memory in use.
_RESET_PEAK = "5"


class ResidentMemory:
    """Growth of the peak of this process's resident memory.

    If the kernel does not reset the peak, the memory in use after the runs counts instead.
    """

    def __init__(self) -> None:
        self._peaks = self._reset()
        self._first = resident_bytes()
        kind = "peak resident memory" if self._peaks else "resident memory after the runs"
        # A description for people.
        self.what = f"{kind} of the process beyond the loaded model, with inputs and outputs"

    def start(self) -> None:
        """Set the peak to the memory in use."""
        if self._peaks:
            self._reset()

    def bytes(self) -> int:
        """Return the growth."""
        now = self._peak() if self._peaks else resident_bytes()
        return max(0, now - self._first)

    def _reset(self) -> bool:
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
            self._peak()
        except (OSError, KeyError):
            return False
        return True

    def _peak(self) -> int:
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024


class GpuMemory:
    """Growth of the memory in use on a GPU. ONNX Runtime keeps what a run has taken, so this is the most of all runs."""

    def __init__(self, reader: GpuReader, device: str) -> None:
        self._reader, self._device = reader, device
        self._first = self._used()
        # A description for people.
        self.what = f"memory in use on {device} beyond the loaded model, by all of its processes"

    def start(self) -> None:
        """Do nothing, because what a run has taken stays in use."""

    def bytes(self) -> int | None:
        """Return the growth; None if the GPU's memory cannot be read."""
        used = self._used()
        return None if used is None or self._first is None else max(0, used - self._first)

    def _used(self) -> int | None:
        readings = self._reader.statistics([self._device])
        return readings[0].memory_used_bytes if readings else None
