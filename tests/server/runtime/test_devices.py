"""Choice of devices by --device, with a scripted driver."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from tensorferry.server.errors import StartError
from tensorferry.server.runtime.devices import (
    AvailableDevices,
    available_devices,
    choose_device,
    cuda_device_count,
    pci_bus_id,
)


class Driver:
    """Stand-in for libcuda: results are written to the arguments, and a code other than 0 is an error."""

    def __init__(self, *bus_ids: str, works: bool = True) -> None:
        self._bus_ids = bus_ids
        self._works = works

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return 0 if self._works else 100

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._bus_ids)
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        # A device's handle need not be its number.
        device._obj.value = ordinal + 40
        return 0 if ordinal < len(self._bus_ids) else 101

    def cuDeviceGetPCIBusId(self, text: Any, size: int, device: Any) -> int:
        bus_id = self._bus_ids[device.value - 40]
        if size <= len(bus_id):
            return 1
        text.value = bus_id.encode()
        return 0


def use(monkeypatch: pytest.MonkeyPatch, driver: Driver | None, cuda: bool = True) -> None:
    def load(name: str) -> Driver:
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"] if cuda else ["CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None, raising=False)


TWO = Driver("0000:3b:00.0", "10001:00:00.0")


def test_devices_of_the_driver_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, TWO)
    assert cuda_device_count() == 2
    assert [pci_bus_id(index) for index in range(3)] == ["0000:3b:00.0", "10001:00:00.0", None]


@pytest.mark.parametrize("driver", [None, Driver("0000:3b:00.0", works=False)])
def test_a_missing_or_broken_driver_has_no_devices(
    driver: Driver | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, driver)
    assert cuda_device_count() == 0
    assert pci_bus_id(0) is None


@pytest.mark.parametrize(
    ("wanted", "driver", "cuda", "missing"),
    [
        ("cuda", None, True, "there is no CUDA device 0 (the driver reports 0)"),
        ("cuda:0,1", None, False, "the installed onnxruntime has no CUDA provider"),
        ("cuda:2", TWO, True, "there is no CUDA device 2 (the driver reports 2)"),
        ("cuda:0,2", TWO, True, "there is no CUDA device 2 (the driver reports 2)"),
    ],
)
def test_a_requested_gpu_that_is_missing_is_an_error(
    wanted: str, driver: Driver | None, cuda: bool, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, driver, cuda)
    with pytest.raises(StartError, match="use --device cpu, or auto") as caught:
        choose_device(wanted)
    assert str(caught.value).startswith(f"--device is {wanted!r}, but {missing}")


@pytest.mark.parametrize(
    ("wanted", "chosen", "gpus"),
    [
        ("auto", "cuda:0", (0, 1)),
        ("cuda", "cuda:0", (0, 1)),
        ("cuda:1", "cuda:1", (1,)),
        ("cuda:0,1", "cuda:0,1", (0, 1)),
        ("cuda:1,0", "cuda:1,0", (1, 0)),
    ],
)
def test_devices_chosen_of_two_gpus(
    wanted: str, chosen: str, gpus: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, TWO)
    assert choose_device(wanted) == chosen
    assert available_devices(wanted, chosen) == AvailableDevices(chosen, gpus)


@pytest.mark.parametrize(
    ("wanted", "driver", "why"),
    [("cpu", TWO, "--device is cpu"), ("auto", None, "there is no CUDA device 0 (the driver reports 0)")],
)
def test_configurations_cannot_use_a_gpu_that_is_excluded(
    wanted: str, driver: Driver | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, driver)
    assert available_devices(wanted, "cpu") == AvailableDevices("cpu", (), why)


def test_messages_about_missing_libraries_go_to_the_log_not_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, TWO)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda **where: print("Failed to load libcublas.so.13"))
    assert choose_device("cuda") == "cuda:0"
    assert capsys.readouterr().out == "", "the parent process reads JSON from stdout"
    assert caplog.messages == ["ONNX Runtime's CUDA libraries: Failed to load libcublas.so.13"]


def test_libraries_in_other_package_folders_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, TWO)
    for name in ("cublas", "cudnn"):
        (tmp_path / "nvidia" / name / "lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded: list[str] = []

    def preload(directory: str = "") -> None:
        if directory.startswith(str(tmp_path)):
            loaded.append(directory.removeprefix(str(tmp_path)))
        if len(loaded) < 2:
            print("Failed to load libcudnn.so.9")

    monkeypatch.setattr(onnxruntime, "preload_dlls", preload)
    choose_device("cuda")
    assert loaded == ["/nvidia/cublas/lib", "/nvidia/cudnn/lib"]
    assert caplog.messages == []
