"""Scripted NVML: the interface of pynvml (nvidia-ml-py) for fake GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from tensorferry.server.runtime.gpu.gpu_readings import GpuReader


class NVMLError(Exception):
    """Base of NVML's errors, as in pynvml."""


@dataclass
class FakeGpu:
    """GPU at an address of the PCI bus. `unsupported` names the readings that it does not support."""

    bus_id: str
    uuid: str
    busy: int = 0
    used: int = 0
    total: int = 80 << 30
    celsius: int = 30
    milliwatts: int = 60_000
    limit: int = 700_000
    millijoules: int = 5_000_000
    unsupported: set[str] = field(default_factory=set)


class FakeNvml:
    """NVML, whose order of GPUs is not CUDA's."""

    NVML_TEMPERATURE_GPU = 0
    NVMLError = NVMLError

    def __init__(self, *gpus: FakeGpu, starts: bool = True) -> None:
        self.gpus = gpus
        self.ready = 0
        self._starts = starts

    def nvmlInit(self) -> None:
        if not self._starts:
            raise NVMLError("Driver/library version mismatch")
        self.ready += 1

    def nvmlShutdown(self) -> None:
        self._check()
        self.ready -= 1

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: bytes) -> FakeGpu:
        self._check()
        # NVML itself writes capitals and a longer domain, and accepts both forms.
        for gpu in self.gpus:
            if gpu.bus_id.lower() == bus_id.decode().lower():
                return gpu
        raise NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        self._read(gpu, "uuid")
        return gpu.uuid

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        self._read(gpu, "utilization")
        return SimpleNamespace(gpu=gpu.busy, memory=0)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        self._read(gpu, "memory")
        return SimpleNamespace(total=gpu.total, used=gpu.used, free=gpu.total - gpu.used)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        self._read(gpu, "temperature")
        return gpu.celsius

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        self._read(gpu, "power")
        return gpu.milliwatts

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:
        self._read(gpu, "limit")
        return gpu.limit

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        self._read(gpu, "energy")
        return gpu.millijoules

    def _read(self, gpu: FakeGpu, what: str) -> None:
        self._check()
        if what in gpu.unsupported:
            raise NVMLError("Not Supported")

    def _check(self) -> None:
        if not self.ready:
            raise NVMLError("Uninitialized")


def reader_of(*gpus: FakeGpu, places: Sequence[str | None] | None = None) -> GpuReader:
    """Return a reader of these GPUs. CUDA has them in the same order, or has GPUs at other places of the PCI bus."""
    nvml = FakeNvml(*gpus)
    nvml.nvmlInit()
    found = [gpu.bus_id for gpu in gpus] if places is None else places
    return GpuReader(nvml, lambda index: found[index])
