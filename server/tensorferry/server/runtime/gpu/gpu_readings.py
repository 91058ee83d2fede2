"""Readings of GPUs from NVIDIA's management library (NVML): utilization, memory, temperature and power.

NVML is called only when metrics are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorferry.server.runtime.devices import pci_bus_id
from tensorferry.server.system.install_command import install_command

_log = logging.getLogger("tensorferry.server")


@dataclass(frozen=True, slots=True)
class GpuStatistics:
    """Readings of a GPU at one moment; None for a reading that is not available.

    `device` is `cuda:N`, `uuid` the global name. `utilization` is the share of the last sampling period (at most a
    second) in which a kernel ran. `energy_joules` counts from the first reading.
    """

    device: str
    uuid: str
    utilization: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_celsius: float | None
    power_watts: float | None
    power_limit_watts: float | None
    energy_joules: float | None


@dataclass(frozen=True, slots=True)
class _FoundDevice:
    """Device that NVML has found: its handle, and its energy counter at that time."""

    handle: Any
    uuid: str
    millijoules: int


class GpuReader:
    """Reader of CUDA devices through NVML. Thread-safe.

    `nvml` is the initialised module pynvml, or an equivalent.
    """

    def __init__(self, nvml: Any, bus_id: Callable[[int], str | None] = pci_bus_id) -> None:
        self._nvml = nvml
        self._bus_id = bus_id
        # By device; None for one that NVML does not find. Written only with setdefault.
        self._found: dict[str, _FoundDevice | None] = {}

    def statistics(self, devices: Iterable[str]) -> Sequence[GpuStatistics]:
        """Return the readings of those devices that are GPUs (`cuda:N`) and known to NVML."""
        readings = []
        seen = set()
        for device in devices:
            device_found = self._find(device) if device.startswith("cuda:") else None
            # Partitions of a GPU (MIG) share a bus id.
            if device_found is not None and device_found.uuid not in seen:
                seen.add(device_found.uuid)
                readings.append(self._read(device, device_found))
        return readings

    def close(self) -> None:
        """Shut NVML down. Later readings are None."""
        self._query("nvmlShutdown")

    def _find(self, device: str) -> _FoundDevice | None:
        if device not in self._found:
            found = None
            # NVML has its own numbers, which ignore CUDA_VISIBLE_DEVICES.
            bus_id = self._bus_id(int(device.partition(":")[2]))
            handle = bus_id and self._query("nvmlDeviceGetHandleByPciBusId", bus_id.encode())
            uuid = handle and self._query("nvmlDeviceGetUUID", handle)
            if uuid is None:
                _log.warning("NVML does not find %s: it has no metrics", device)
            else:
                uuid = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
                energy = self._query("nvmlDeviceGetTotalEnergyConsumption", handle) or 0
                found = _FoundDevice(handle, uuid, energy)
            self._found.setdefault(device, found)
        return self._found[device]

    def _read(self, device: str, found: _FoundDevice) -> GpuStatistics:
        handle = found.handle
        rates = self._query("nvmlDeviceGetUtilizationRates", handle)
        memory = self._query("nvmlDeviceGetMemoryInfo", handle)
        energy = self._query("nvmlDeviceGetTotalEnergyConsumption", handle)
        return GpuStatistics(
            device=device,
            uuid=found.uuid,
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            temperature_celsius=self._query(
                "nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU
            ),
            power_watts=_thousandth(self._query("nvmlDeviceGetPowerUsage", handle)),
            power_limit_watts=_thousandth(self._query("nvmlDeviceGetEnforcedPowerLimit", handle)),
            energy_joules=_thousandth(None if energy is None else max(0, energy - found.millijoules)),
        )

    def _query(self, function: str, *arguments: Any) -> Any:
        """Call NVML. Return None if the reading is not available, for example for a partition or a lost GPU."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError as error:
            _log.debug("%s: %s", function, error)
            return None


def open_nvml() -> GpuReader | None:
    """Initialise NVML. Return None, with a warning, if it is missing."""
    try:
        import pynvml
    except ImportError:
        _log.warning("no GPU metrics: nvidia-ml-py is not installed (%s has it)", install_command("gpu"))
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _log.warning("no GPU metrics: NVML does not start (%s)", error)
        return None
    return GpuReader(pynvml)


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1e3
