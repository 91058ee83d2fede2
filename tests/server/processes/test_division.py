"""How the cores, the GPUs and the limits are divided between server processes."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tensorferry.server.config.server_config import ServerConfig
from tensorferry.server.processes import division
from tensorferry.server.processes.division import Division, divided_gpus, division_of, share_of, used_gpus


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container with three GPUs of a machine by its device files, and with onnxruntime-gpu."""
    package = tmp_path / "onnxruntime"
    (package / "capi").mkdir(parents=True)
    (package / "capi/libonnxruntime_providers_cuda.so").touch()
    for name in ("nvidia2", "nvidia3", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    found: ModuleSpec | None = ModuleSpec("onnxruntime", None, origin=str(package / "__init__.py"))
    monkeypatch.setattr(division, "find_spec", lambda name: found)
    return tmp_path


def config(processes: int | None = None, **options: object) -> ServerConfig:
    return ServerConfig((), processes=processes, **options)  # type: ignore[arg-type]


class TestGpus:
    def test_they_are_those_of_the_device_files_or_of_the_environment(self, machine: Path) -> None:
        assert used_gpus(["auto"], {}, machine) == ["0", "1", "2"]
        for visible, gpus in [("1, 3", ["1", "3"]), ("GPU-8d,", ["GPU-8d"]), ("", []), ("0,-1,2", ["0"])]:
            assert used_gpus(["auto", "cuda"], {"CUDA_VISIBLE_DEVICES": visible}, machine) == gpus

    @pytest.mark.parametrize("device", ["cpu", "cuda:1"])
    def test_they_are_not_divided_if_a_model_is_bound_to_a_device(self, machine: Path, device: str) -> None:
        assert not used_gpus(["auto", device], {}, machine)

    def test_without_a_runtime_for_gpus_there_are_none(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (machine / "onnxruntime/capi/libonnxruntime_providers_cuda.so").unlink()
        assert not used_gpus(["auto"], {}, machine)
        monkeypatch.setattr(division, "find_spec", lambda name: None)
        assert not used_gpus(["auto"], {}, machine)

    @pytest.mark.parametrize(
        ("count", "processes", "divided"),
        [(1, 2, ()), (4, 1, ()), (2, 3, ("0", "1", "0")), (5, 2, ("0,2,4", "1,3"))],
    )
    def test_each_process_sees_its_own(self, count: int, processes: int, divided: tuple[str, ...]) -> None:
        assert divided_gpus([str(number) for number in range(count)], processes) == divided


@pytest.mark.parametrize(
    ("cores", "processes", "text"),
    [
        (1, 1, "1 core: one process"),
        (8, 2, "each with all models in its memory, and with 4 threads for each session on a CPU"),
        (128, 8, "with 16 threads"),
    ],
)
def test_auto_on_a_cpu_is_a_process_for_each_four_cores(
    cores: int, processes: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(division, "usable_cores", lambda: cores)
    found = division_of(config(device="cpu"))
    assert found == Division(cores, processes)
    assert text in str(found)


def test_auto_is_a_process_for_each_gpu(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "usable_cores", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    found = division_of(config())
    assert found == Division(2, 2, ("3", "5"))
    assert "2 cores: 2 server processes, GPUs 3 and 5, each with" in str(found)
    assert "1 thread for each session" in str(found)
    assert division_of(config(4)).gpus == ("3", "5", "3", "5")


class TestLimits:
    def test_each_process_has_its_part_rounded_up_and_0_stays_no_limit(self) -> None:
        clients = {"client_max_requests": 5, "client_max_rows": 4, "client_max_bytes": 0}
        server = {"max_queue_size": 9, "max_connections": 7, "max_calls": 1, "max_unsent_bytes": 11}
        sequences = {"max_sequences": 3, "max_state_bytes": 5}
        limits = {**clients, **server, **sequences, "max_streams": 6}
        share = share_of(config(2, client_rate=0.5, **limits), 2)
        parts = {name: getattr(share, name) for name in limits}
        assert parts == {name: -(-limit // 2) for name, limit in limits.items()}
        assert share.client_rate == 0.25
        assert share_of(config(), 2).max_streams is None
        assert [share_of(config(max_connection_age=age), 2).max_connection_age for age in (0, 300)] == [
            60,
            300,
        ]

    @pytest.mark.parametrize(("limit", "part"), [(400, 200), (150, 100), (60, 60)])
    def test_the_largest_message_fits_in_each_process(self, limit: int, part: int) -> None:
        share = share_of(config(max_queue_bytes=limit, client_max_bytes=limit, max_message_bytes=100), 2)
        assert (share.max_queue_bytes, share.client_max_bytes) == (part, part)

    def test_tables_of_models_are_divided_where_they_give_a_limit(self) -> None:
        tables = {"m": {"max_queue_size": 5, "max_batch_size": 16}, "n": {"client_rate": 3.0}}
        share = share_of(config(max_queue_size=100, model_options=tables), 2)
        assert share.model_options == {
            "m": {"max_queue_size": 3, "max_batch_size": 16},
            "n": {"client_rate": 1.5},
        }
        assert share.for_model("n").max_queue_size == 50
