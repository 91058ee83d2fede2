"""What the GPUs do that serve: use, memory, temperature and power, as NVIDIA's management library (NVML) tells.

Nothing is asked while requests are served, but when somebody reads the figures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorferry.server.runtime.devices import pci_bus_id

_log = logging.getLogger("tensorferry.server")


@dataclass(frozen=True, slots=True)
class GpuStatistics:
    """A GPU's figures at one moment; None for one that it does not tell.

    `device` is its name here, `cuda:N`, `uuid` the one that it has everywhere. `utilization` is the share of the
    last sampling period (at most a second) in which a kernel ran. `energy_joules` counts from when the device was
    first looked at.
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
    """A device that was found: by what NVML knows it, and its energy then."""

    handle: Any
    uuid: str
    millijoules: int


class GpuReader:
    """Reads the figures of CUDA devices through NVML, once it is ready. Thread-safe.

    `nvml` is the module pynvml, or what behaves like it.
    """

    def __init__(self, nvml: Any, bus_id: Callable[[int], str | None] = pci_bus_id) -> None:
        self._nvml = nvml
        self._bus_id = bus_id
        # By device, None for one that NVML does not find. Written with setdefault alone: the first stays.
        self._known: dict[str, _FoundDevice | None] = {}

    def statistics(self, devices: Iterable[str]) -> Sequence[GpuStatistics]:
        """The figures of those of these devices that are GPUs, `cuda:N`, and that NVML finds."""
        found = []
        seen = set()
        for device in devices:
            known = self._find(device) if device.startswith("cuda:") else None
            # Parts of one GPU (MIG) are on the bus as one.
            if known is not None and known.uuid not in seen:
                seen.add(known.uuid)
                found.append(self._of(device, known))
        return found

    def close(self) -> None:
        """Lets NVML go: from now on nothing is told."""
        self._ask("nvmlShutdown")

    def _find(self, device: str) -> _FoundDevice | None:
        if device not in self._known:
            known = self._look_up(device)
            if known is None:
                _log.warning("NVML does not find %s: there are no figures of it", device)
            self._known.setdefault(device, known)
        return self._known[device]

    def _look_up(self, device: str) -> _FoundDevice | None:
        # NVML has numbers of its own, which do not follow CUDA_VISIBLE_DEVICES.
        place = self._bus_id(int(device.partition(":")[2]))
        if place is None:
            return None
        handle = self._ask("nvmlDeviceGetHandleByPciBusId", place.encode())
        uuid = None if handle is None else self._ask("nvmlDeviceGetUUID", handle)
        if uuid is None:
            return None
        uuid = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
        return _FoundDevice(handle, uuid, self._ask("nvmlDeviceGetTotalEnergyConsumption", handle) or 0)

    def _of(self, device: str, known: _FoundDevice) -> GpuStatistics:
        handle = known.handle
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        energy = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        return GpuStatistics(
            device=device,
            uuid=known.uuid,
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            temperature_celsius=self._ask(
                "nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU
            ),
            power_watts=_thousandth(self._ask("nvmlDeviceGetPowerUsage", handle)),
            power_limit_watts=_thousandth(self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)),
            energy_joules=_thousandth(None if energy is None else max(0, energy - known.millijoules)),
        )

    def _ask(self, question: str, *arguments: Any) -> Any:
        """The answer; None where the device or the driver has none, as for a part of a GPU or one that fell off."""
        try:
            return getattr(self._nvml, question)(*arguments)
        except self._nvml.NVMLError as error:
            _log.debug("%s: %s", question, error)
            return None


def open_nvml() -> GpuReader | None:
    """NVML, ready to be asked; None, with one line in the log, where it is missing."""
    try:
        import pynvml
    except ImportError:
        _log.warning(
            "the metrics have no figures of the GPUs: nvidia-ml-py is not installed (pip install 'tensorferry[gpu]' has it)"
        )
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _log.warning("the metrics have no figures of the GPUs: NVML does not start (%s)", error)
        return None
    return GpuReader(pynvml)


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1e3
