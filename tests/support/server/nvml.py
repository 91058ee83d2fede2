"""NVML as a script: what the module pynvml of nvidia-ml-py does, for GPUs that a test makes up."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace


class NVMLError(Exception):
    """As pynvml's: the root of its errors."""


@dataclass
class FakeGpu:
    """A GPU as NVML knows it: by its place on the bus. What is in `untold` it does not support."""

    place: str
    uuid: str
    busy: int = 0
    used: int = 0
    total: int = 80 << 30
    celsius: int = 30
    milliwatts: int = 60_000
    limit: int = 700_000
    millijoules: int = 5_000_000
    untold: set[str] = field(default_factory=set)


class FakeNvml:
    """Has NVML's own order of GPUs, which is not that of CUDA. `asked` are the questions of devices, in order."""

    NVML_TEMPERATURE_GPU = 0
    NVMLError = NVMLError

    def __init__(self, *gpus: FakeGpu, starts: bool = True) -> None:
        self.gpus = gpus
        self.ready = 0
        self.asked: list[str] = []
        self._starts = starts

    def nvmlInit(self) -> None:
        if not self._starts:
            raise NVMLError("Driver/library version mismatch")
        self.ready += 1

    def nvmlShutdown(self) -> None:
        self._check()
        self.ready -= 1

    def nvmlDeviceGetHandleByPciBusId(self, place: bytes) -> FakeGpu:
        self._check()
        # It writes its own with capitals and a longer domain, and takes both.
        for gpu in self.gpus:
            if gpu.place.lower() == place.decode().lower():
                return gpu
        raise NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        self._tell(gpu, "uuid")
        return gpu.uuid

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        self._tell(gpu, "utilization")
        return SimpleNamespace(gpu=gpu.busy, memory=0)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        self._tell(gpu, "memory")
        return SimpleNamespace(total=gpu.total, used=gpu.used, free=gpu.total - gpu.used)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        self._tell(gpu, "temperature")
        return gpu.celsius

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        self._tell(gpu, "power")
        return gpu.milliwatts

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:
        self._tell(gpu, "limit")
        return gpu.limit

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        self._tell(gpu, "energy")
        return gpu.millijoules

    def _tell(self, gpu: FakeGpu, what: str) -> None:
        self._check()
        self.asked.append(what)
        if what in gpu.untold:
            raise NVMLError("Not Supported")

    def _check(self) -> None:
        if not self.ready:
            raise NVMLError("Uninitialized")
