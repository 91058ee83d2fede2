"""Which device --device comes to, and what a machine without it says."""

from __future__ import annotations

import pytest

from tensorferry.server.devices import choose_device
from tensorferry.server.errors import StartError


@pytest.mark.parametrize("wanted", ["cpu", "auto"])
def test_without_a_gpu_models_run_on_the_cpu(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorferry.server.devices.cuda_device_count", lambda: 0)
    assert choose_device(wanted) == "cpu"


@pytest.mark.parametrize("wanted", ["cuda", "cuda:3"])
def test_a_gpu_that_is_asked_for_and_missing_is_an_error(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorferry.server.devices.cuda_device_count", lambda: 0)
    with pytest.raises(StartError) as caught:
        choose_device(wanted)
    assert f"--device is {wanted!r}, but " in str(caught.value)
    assert "use --device cpu, or auto" in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "devices", "chosen"),
    [
        ("auto", 1, "cuda:0"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
        ("cuda:1", 1, None),
        ("auto", 0, "cpu"),
    ],
)
def test_devices_are_counted(
    wanted: str, devices: int, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "tensorferry.server.devices"
    monkeypatch.setattr(f"{module}.onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(f"{module}.onnxruntime.preload_dlls", lambda: None, raising=False)
    monkeypatch.setattr(f"{module}.cuda_device_count", lambda: devices)
    if chosen is not None:
        assert choose_device(wanted) == chosen
        return
    with pytest.raises(StartError, match=r"there is no CUDA device 1 \(the driver reports 1\)"):
        choose_device(wanted)
