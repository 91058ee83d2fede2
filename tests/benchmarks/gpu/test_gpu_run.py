"""Models and processes of `make gpu-bench`, and a run of a second or two of all of it on the CPU."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from gpu.cores import Layout
from gpu.loadgen import Load, LoadError
from gpu.loop import Loop, LoopError
from gpu.models import IDS, MASK, Bert, Resnet, build_bert, build_resnet
from gpu.needs import _version_folder
from gpu.part import Part, Plan
from gpu.report import report
from gpu.servers import _LIMITS, DEFAULT, VARIANTS, ServerError, serving, warm_up
from gpu.workloads import BERT, ON_CPU, ON_GPU, RESNET, Workload
from tensorferry.server.config.flags import read_flags
from tensorferry.server.config.server_config import OPTIONS
from tensorferry.server.startup import command_parser

BRIEF = Plan(
    rounds=1,
    seconds=math.inf,
    warm_up_seconds=5.0,
    loop_seconds=0.01,
    offline_seconds=0.3,
    probes=1,
    probe_seconds=0.3,
    confirm_seconds=0.3,
    confirmations=1,
    simulated=200,
    searches=2,
)
CPU = onnxruntime.InferenceSession


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importable in child processes, too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


@pytest.fixture(params=[BERT, RESNET])
def workload(request: pytest.FixtureRequest) -> Workload:
    return ON_CPU[request.param]


def test_a_row_has_the_same_outputs_alone_and_among_others(workload: Workload, tmp_path: Path) -> None:
    session = CPU(str(workload.write(tmp_path)), providers=["CPUExecutionProvider"])
    together = session.run(list(workload.outputs), dict(workload.rows(3, 5)))
    for at in range(3):
        alone = session.run(list(workload.outputs), dict(workload.rows(1, 5 + at)))
        for all_, one in zip(together, alone, strict=True):
            assert np.abs(all_[at] - one[0]).max() < 1e-4
    assert np.abs(together[0][0] - together[0][1]).max() > 1e-2
    assert sum(one[0].nbytes for one in alone) == workload.answer_bytes
    # The file is written once.
    before = workload.write(tmp_path).stat().st_mtime_ns
    assert workload.write(tmp_path).stat().st_mtime_ns == before


def test_masked_tokens_are_ignored(tmp_path: Path) -> None:
    workload = ON_CPU[BERT]
    session = CPU(str(workload.write(tmp_path)), providers=["CPUExecutionProvider"])
    row = dict(workload.rows(1))
    seen = row[MASK][0].astype(bool)
    assert 0 < seen.sum() < seen.size
    expected = session.run(None, row)[0][0][seen]
    row[IDS] = np.where(seen, row[IDS], 7)
    assert np.abs(session.run(None, row)[0][0][seen] - expected).max() < 1e-5
    row[IDS][0, 0] += 1
    assert np.abs(session.run(None, row)[0][0][seen] - expected).max() > 1e-3


def test_the_models_for_a_gpu_are_of_their_kind() -> None:
    """The models have as many parameters as the real ones, all in FP16."""
    half = (build_bert(Bert(layers=1, vocabulary=100)), build_resnet(Resnet(blocks=(1, 1, 1, 1))))
    for model in half:
        onnx.checker.check_model(model)
        kinds = {tensor.data_type for tensor in model.graph.initializer}
        assert kinds <= {onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64}
    shape = ON_GPU[RESNET].model
    assert isinstance(shape, Resnet)
    assert _parameters(build_resnet(shape)) == pytest.approx(25.5e6, rel=0.01)
    # One layer of BERT-base has 7.1 million parameters.
    two = build_bert(Bert(layers=2, vocabulary=100))
    assert _parameters(two) - _parameters(half[0]) == pytest.approx(7.09e6, rel=0.01)


def _parameters(model: onnx.ModelProto) -> int:
    return sum(int(np.prod(tensor.dims)) for tensor in model.graph.initializer)


def test_fp16_stays_finite_through_all_layers(tmp_path: Path) -> None:
    path = tmp_path / "resnet.onnx"
    onnx.save(build_resnet(Resnet(width=8, size=32)), str(path))
    image = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    (logits,) = CPU(str(path), providers=["CPUExecutionProvider"]).run(None, {"image": image})
    assert logits.dtype == np.float16
    assert np.isfinite(logits).all()
    assert np.abs(logits[0] - logits[1]).max() > 1e-2


def test_the_bare_loop_times_batches_and_returns_outputs(workload: Workload, tmp_path: Path) -> None:
    path = workload.write(tmp_path)
    layout = Layout.here()
    with Loop(path, workload, "cpu", layout.server, tmp_path / "log") as loop:
        timed = loop.timed(2, 0.01, copies=False)
        assert timed.rate == pytest.approx(2 / timed.batch_seconds)
        outputs = loop.outputs(3)
    session = CPU(str(path), providers=["CPUExecutionProvider"])
    expected = session.run(list(workload.outputs), dict(workload.rows(1, 3)))
    for name, array in zip(workload.outputs, expected, strict=True):
        assert np.abs(np.array(outputs[name]) - array[0]).max() < 1e-4


def test_a_bare_loop_that_cannot_load_its_model_says_why(tmp_path: Path) -> None:
    with (
        Loop(tmp_path / "none.onnx", ON_CPU[BERT], "cpu", Layout.here().server, tmp_path / "log") as loop,
        pytest.raises(LoopError, match=r"none\.onnx"),
    ):
        loop.timed(1, 0.01, copies=False)


def test_a_server_that_answers_something_else_is_not_measured(tmp_path: Path) -> None:
    workload, cores = ON_CPU[RESNET], Layout.here().server
    model = workload.write(tmp_path)
    with serving(DEFAULT, workload, model, "cpu", 2, cores) as server:
        zeros = {name: [1.0] * 1000 for name in workload.outputs}
        with pytest.raises(ServerError, match="with something else than ONNX Runtime does"):
            warm_up(server, workload, 2, zeros, 5.0)


def test_every_size_is_warmed_up_while_there_is_time(tmp_path: Path) -> None:
    workload, cores = ON_CPU[RESNET], Layout.here().server
    model = workload.write(tmp_path)
    with Loop(model, workload, "cpu", cores, tmp_path / "log") as loop:
        expected = loop.outputs(0)
    with serving(DEFAULT, workload, model, "cpu", 4, cores) as server:
        difference, cold = warm_up(server, workload, 4, expected, 60.0)
        assert difference < 1e-3
        assert cold == 0
        assert warm_up(server, workload, 4, expected, 0.0)[1] == 3


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"default did not start: (.|\n)*none.onnx"),
        serving(DEFAULT, ON_CPU[BERT], tmp_path / "none.onnx", "cpu", 2, Layout.here().server),
    ):
        raise AssertionError("it started")


def test_a_server_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    workload = ON_CPU[BERT]
    with (
        pytest.raises(ServerError, match="default did not start: "),
        serving(DEFAULT, workload, workload.write(tmp_path), "cpu", 2, Layout.here().server, 0.01),
    ):
        raise AssertionError("it started")


def test_every_server_takes_its_flags() -> None:
    for variant in VARIANTS:
        read_flags(command_parser(), ["model.onnx", *_LIMITS, *variant.flags], OPTIONS)


def test_a_load_process_that_dies_ends_the_run_with_an_error(tmp_path: Path) -> None:
    pytest.importorskip("mlperf_loadgen", reason="`make gpu-bench` installs it")
    workload, layout = ON_CPU[BERT], Layout.here()
    with (
        serving(DEFAULT, workload, workload.write(tmp_path), "cpu", 4, layout.server) as server,
        Load(server.address, workload, layout, tmp_path) as load,
    ):
        assert not load.server(200.0, 0.2).errors
        (sender, *_) = load.processes
        kill = threading.Timer(0.3, os.kill, (sender, signal.SIGKILL))
        kill.start()
        # Without the watch LoadGen would wait for its queries for ever.
        with pytest.raises(LoadError, match=r"of the \d+ load processes have ended"):
            load.server(200.0, 3.0)
        kill.join()


def test_an_interrupt_is_raised_once_loadgen_is_done(tmp_path: Path) -> None:
    pytest.importorskip("mlperf_loadgen", reason="`make gpu-bench` installs it")
    workload, layout = ON_CPU[BERT], Layout.here()
    with (
        serving(DEFAULT, workload, workload.write(tmp_path), "cpu", 4, layout.server) as server,
        Load(server.address, workload, layout, tmp_path) as load,
    ):
        before = signal.getsignal(signal.SIGTERM)
        stop = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
        stop.start()
        with pytest.raises(KeyboardInterrupt):
            load.server(200.0, 1.0)
        stop.join()
        assert signal.getsignal(signal.SIGTERM) is before
        assert not load.server(200.0, 0.2).errors


def test_the_checkout_has_a_version_where_nothing_is_installed() -> None:
    folder = _version_folder()
    (told,) = metadata.distributions(path=[str(folder)])
    assert (told.name, told.version) == ("tensorferry", metadata.version("tensorferry"))


def test_measurements_without_time_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlperf_loadgen", reason="`make gpu-bench` installs it")
    said: list[str] = []
    # As if the bare loop had found another fastest size than the bound allows.
    monkeypatch.setattr(
        "gpu.part.why_not", lambda variant, *more, **which: "" if not variant.for_gpu else "of a GPU"
    )
    part = Part(
        ON_CPU[RESNET], replace(BRIEF, rounds=3, probes=3, seconds=0.0), "cpu", Layout.here(), said.append
    )
    kept: list[int] = []
    part.keep = lambda: kept.append(len(part.results["offline"]))
    part.run(tmp_path, tmp_path)
    got = part.results
    assert got["skipped"]["throughput"] == "there was no time to start it"
    assert {row["round"] for row in got["offline"]} == {0}
    assert len([row for row in got["server"] if not row["confirms"]]) == 2, "one of each server"
    assert "no time for another round: 1 of 3 are done" in said
    assert "no time to search on: 1 of 3 rates are tried" in said
    assert kept[0] == 2, "kept before the search"


def test_the_whole_in_seconds_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("mlperf_loadgen", reason="`make gpu-bench` installs it")
    said: list[str] = []
    part = Part(ON_CPU[RESNET], BRIEF, "cpu", Layout.here(), said.append)
    part.run(tmp_path, tmp_path)
    got = part.results
    assert {row["variant"] for row in got["offline"]} >= {"default", "eager"}
    assert all(row["errors"] == 0 and row["rate"] > 0 for row in (*got["offline"], *got["server"]))
    assert all(row["account"]["rows"] <= 16 for row in got["offline"])
    assert {row["variant"] for row in got["server"]} == {"default", "eager"}
    # None if this machine is so busy that the wire alone takes longer than the bound.
    assert got["predicted"] is None or got["predicted"]["offline"] > 0
    assert got["skipped"]["CUDA graphs"] == "it differs on a GPU only"
    assert "failure" not in got
    described = {"date": "", "command": "", "device": "CPU", "small": True, "layout": "", "workload": RESNET}
    machine = {"processor": "", "cores": 2, "python": "", "versions": {}}
    assert "Not measured on a GPU" in report({"parts": {RESNET: {**described, "machine": machine, **got}}})
