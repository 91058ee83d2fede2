"""Staging buffers with the CPU as the device: layouts, lifetimes, fallbacks, captured graphs."""

from __future__ import annotations

import ctypes
import gc
import logging
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.runtime.test_session import numbers
from support.models import small
from support.server.cpu_as_device import CountingDeviceMemory
from support.server.rig import fp32

from tensorferry.server.errors import ModelFailedError
from tensorferry.server.runtime.gpu.buffer_pool import BufferPool
from tensorferry.server.runtime.gpu.cuda_graphs import CapturedShapes, GraphOptions
from tensorferry.server.runtime.gpu.pinned_memory import MemoryBlock
from tensorferry.server.runtime.gpu.staging_buffers import StagedBatch
from tensorferry.server.runtime.gpu.tensor_layout import Shape, tensor_layout_for
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.providers import open_session
from tensorferry.server.runtime.session import Session


@pytest.mark.parametrize("name", ["FP32", "BF16", "BOOL"])
def test_arrays_of_every_datatype_and_size_are_unchanged(
    name: str, tmp_path: Path, device: CountingDeviceMemory
) -> None:
    session = Session(small.echo(tmp_path / "m.onnx", name), memory=device)
    whole = numbers(name)
    for x in (whole, whole[:1], whole[:0], whole[:, :0], np.ascontiguousarray(whole[:, 1:]), whole):
        out = session.run({"x": x})["x_out"]
        assert (out.dtype, out.shape, out.tobytes()) == (x.dtype, x.shape, x.tobytes())
    assert device.loads == device.fetches == 6


def test_tensors_are_placed_at_aligned_offsets(tmp_path: Path) -> None:
    signature = Session(small.masked_mean(tmp_path / "m.onnx")).signature
    layout = tensor_layout_for(signature, {"ids": (3, 50), "mask": (3, 50)})
    places = [*layout.inputs, *layout.outputs]
    assert [(place.spec.name, place.shape, place.offset) for place in places] == [
        ("ids", (3, 50), 0),
        ("mask", (3, 50), 1280),
        ("tokens", (3, 50, 4), 2560),
        ("mean", (3, 4), 5120),
    ]
    assert (layout.nbytes, layout.unknown) == (5376, ())
    disagreeing = tensor_layout_for(signature, {"ids": (3, 50), "mask": (3, 49)})
    assert [spec.name for spec in disagreeing.unknown] == ["tokens"]
    assert [
        spec.name
        for spec in tensor_layout_for(signature, {"ids": (1, 1), "mask": (1, 1)}, outputs=False).unknown
    ] == ["tokens", "mean"]


# Lifetimes.


def test_a_view_of_an_output_keeps_its_values(tmp_path: Path, device: CountingDeviceMemory) -> None:
    session = Session(small.twice(tmp_path / "m.onnx"), memory=device)
    rows = [session.run({"x": fp32(4, 3) + number})["y"][1:2, :2] for number in range(5)]
    for number, row in enumerate(rows):
        assert row.tolist() == ((fp32(4, 3) + number) * 2)[1:2, :2].tolist()
    assert (len(device.hosts), len(device.devices)) == (5, 1)
    view, rows = rows[2][0], []
    for _ in range(10):
        assert session.run({"x": fp32(4, 3)})["y"].tolist() == (fp32(4, 3) * 2).tolist()
    assert len(device.hosts) == 5, "blocks are reused"
    assert view.tolist() == ((fp32(4, 3) + 2) * 2)[1, :2].tolist()


def test_a_batch_that_is_dropped_at_any_step_releases_its_memory(
    tmp_path: Path, device: CountingDeviceMemory
) -> None:
    session = Session(small.lookup(tmp_path / "m.onnx"), memory=device)
    steps = session.staged
    assert steps is not None
    wanted = {"index": (np.dtype("<i8"), (2,))}

    def filled(value: int) -> Any:
        batch = steps.place(wanted)
        assert batch is not None
        batch["index"][:] = value
        return batch

    for _ in range(3):
        filled(1)
        steps.load(filled(2))
        with pytest.raises(ModelFailedError):
            steps(steps.load(filled(77)))
        assert steps.fetch(steps(steps.load(filled(3))))["y"].tolist() == [[3], [3]]
    gc.collect()
    assert (len(device.hosts), len(device.devices)) == (1, 1)


def test_the_pool_is_bounded_and_frees_unused_buffers_of_other_sizes() -> None:
    allocated: list[int] = []

    def allocate(nbytes: int) -> MemoryBlock:
        allocated.append(nbytes)
        return MemoryBlock(0, nbytes, lambda: None)

    pool = BufferPool(allocate, 3 * 4096)
    one, two = pool.acquire(4096), pool.acquire(1)
    assert one is not None
    assert two is not None
    assert pool.acquire(8192) is None
    pool.release(one)
    assert pool.acquire(4000) is one
    pool.release(one)
    pool.release(two)
    assert pool.acquire(8192) is not None
    assert allocated == [4096, 4096, 8192]
    assert pool.acquire(8192) is None


def test_a_batch_runs_unstaged_if_device_memory_is_exhausted(
    tmp_path: Path, device: CountingDeviceMemory, caplog: pytest.LogCaptureFixture
) -> None:
    device.full = True
    session = Session(small.twice(tmp_path / "m.onnx"), memory=device)
    for _ in range(2):
        assert session.run({"x": fp32(2, 3)})["y"].tolist() == (fp32(2, 3) * 2).tolist()
    assert caplog.text.count("no memory of 4096 bytes for a batch") == 1
    device.full = False
    assert session.run({"x": fp32(2, 3)})["y"].tolist() == (fp32(2, 3) * 2).tolist()
    assert device.loads == 1


# Outputs.


def test_an_output_of_unknown_shape_is_returned(tmp_path: Path, device: CountingDeviceMemory) -> None:
    session = Session(small.found(tmp_path / "m.onnx"), memory=device)
    kept = []
    for ones in (1, 3, 2, 0):
        x = np.zeros((1, 3), np.float32)
        x[0, :ones] = 1
        outputs = session.run({"x": x})
        assert list(outputs) == ["at", "same"]
        assert outputs["at"].tolist() == [[0] * ones, list(range(ones))]
        kept.append(outputs["at"])
    assert [array.shape for array in kept] == [(2, 1), (2, 3), (2, 2), (2, 0)]
    assert kept[1].tolist() == [[0, 0, 0], [0, 1, 2]]


def kept_rows(path: Path) -> Path:
    """y = the positive values of x, declared as [batch, 1] although there may be fewer."""
    text = """(float[batch, 1] x) => (float[batch, 1] y) {
        flat = Squeeze (x, axes) kept = Greater (flat, zero) y = Compress <axis = 0> (x, kept)
    }"""
    return small.written(path, text, axes=np.array([1]), zero=np.float32(0))


def test_an_output_that_contradicts_its_declared_shape_is_returned(
    tmp_path: Path, device: CountingDeviceMemory, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(kept_rows(tmp_path / "m.onnx"), memory=device)
    for _ in range(2):
        assert session.run({"x": np.array([[0], [7]], np.float32)})["y"].tolist() == [[7]]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "declares wrong shapes for its outputs" in line
    assert device.loads == 3, "one batch was repeated, once"


def test_a_failed_request_does_not_make_output_shapes_unknown(
    tmp_path: Path, device: CountingDeviceMemory, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(small.with_positions(tmp_path / "m.onnx", most=4), memory=device)
    with pytest.raises(ModelFailedError):
        session.run({"x": np.ones((1, 9), np.float32)})
    before = device.loads
    assert session.run({"x": np.zeros((1, 2), np.float32)})["y"].tolist() == [[0, 1]]
    assert (device.loads, caplog.records) == (before + 1, [])


# Captured graphs.


def test_a_scalar_input_has_captured_shapes() -> None:
    captured = CapturedShapes([{"a": (), "b": (4,)}], pads=False)
    assert captured.captured_shape({"a": (), "b": (4,)}) == {"a": (), "b": (4,)}
    assert captured.captured_shape({"a": (), "b": (5,)}) is None


class Graphs:
    """Stand-in for CUDA graphs: the first run of a number is captured, later runs use its addresses."""

    def __init__(self, session: Session) -> None:
        self.ran: list[int | None] = []
        self.captured: dict[int, Any] = {}
        self.stale = False
        self._original = session._run_bound

    def __call__(self, binding: Any, graph: int | None) -> None:
        self.ran.append(graph)
        if graph is None:
            self._original(binding, None)
        elif graph not in self.captured or not self.stale:
            self._original(self.captured.setdefault(graph, binding), None)


Capture = Callable[..., tuple[Session, Graphs]]


@pytest.fixture
def capture(tmp_path: Path, device: CountingDeviceMemory, monkeypatch: pytest.MonkeyPatch) -> Capture:
    def make(build: Callable[[Path], Path], *, stale: bool = False) -> tuple[Session, Graphs]:
        settings = OrtOptions(graphs=GraphOptions())
        session = Session(build(tmp_path / "m.onnx"), "cpu", settings, device)
        graphs = Graphs(session)
        graphs.stale = stale
        if session._staging is not None:
            session._staging._run = graphs
        return session, graphs

    return make


def shapes(*rows: int) -> list[Mapping[str, Shape]]:
    return [{"x": (count, 3)} for count in rows]


def test_batches_are_padded_to_captured_shapes_and_outputs_are_cut(
    capture: Capture, device: CountingDeviceMemory
) -> None:
    session, graphs = capture(small.twice)
    assert session.capture(shapes(1, 4), pads=True)
    assert sorted(graphs.captured) == [1, 2, 3, 4]
    assert len(device.devices) == 4, "two slots for each shape"
    graphs.ran.clear()
    kept = []
    for rows in (1, 2, 3, 4, 5, 0, 2):
        x = fp32(rows, 3) + rows
        y = session.run({"x": x})["y"]
        assert y.tolist() == (x * 2).tolist()
        kept.append((y, x))
    assert [graph is not None for graph in graphs.ran] == [True, True, True, True, False, False, True]
    assert {graph for graph in graphs.ran if graph} <= {1, 2, 3, 4}
    assert all(y.tolist() == (x * 2).tolist() for y, x in kept), (
        "outputs keep their values while other graphs run"
    )


def test_padding_rows_are_copies_of_the_last_row(capture: Capture) -> None:
    # Old memory could hold an index that is out of range.
    session, graphs = capture(small.lookup)
    assert session.capture([{"index": (4,)}], pads=True)
    steps = session.staged
    assert steps is not None
    batch = steps.place({"index": (np.dtype("<i8"), (2,))})
    assert isinstance(batch, StagedBatch)
    batch["index"][:] = [7, 5]
    steps.load(batch)
    assert batch.slot is not None
    on_device = ctypes.string_at(batch.slot.block.address, 4 * 8)
    assert np.frombuffer(on_device, "<i8").tolist() == [7, 5, 5, 5]
    assert steps.fetch(steps(batch))["y"].tolist() == [[7], [5]]
    assert graphs.ran[-1] is not None


def test_a_failed_graph_is_repeated_without_the_graph(capture: Capture) -> None:
    session, graphs = capture(small.twice)
    assert session.capture(shapes(2), pads=True)
    original = graphs._original

    def fails_on_graphs(binding: Any, graph: int | None) -> None:
        if binding in graphs.captured.values():
            raise RuntimeError("a shape")
        original(binding, graph)

    graphs._original = fails_on_graphs
    graphs.ran.clear()
    x = fp32(2, 3)
    assert session.run({"x": x})["y"].tolist() == (x * 2).tolist()
    assert [graph is not None for graph in graphs.ran] == [True, False]


def test_a_model_that_mixes_rows_runs_captured_only_at_captured_sizes(capture: Capture) -> None:
    session, graphs = capture(small.centred)
    assert session.capture(shapes(2, 4), pads=False)
    graphs.ran.clear()
    for rows in (2, 3, 4):
        x = fp32(rows, 3)
        assert np.allclose(session.run({"x": x})["y"], x - x.mean(axis=0))
    assert [graph is not None for graph in graphs.ran] == [True, False, True]


def test_batches_beyond_the_two_slots_run_without_a_graph(capture: Capture) -> None:
    session, graphs = capture(small.twice)
    assert session.capture(shapes(2), pads=True)
    graphs.ran.clear()
    steps = session.staged
    assert steps is not None
    batches = []
    for number in range(3):
        batch = steps.place({"x": (np.dtype("<f4"), (2, 3))})
        assert isinstance(batch, StagedBatch)
        batch["x"][:] = number
        batches.append(steps.load(batch))
    for number, batch in enumerate(batches):
        assert steps.fetch(steps(batch))["y"].tolist() == [[2 * number] * 3] * 2
    assert sorted(graphs.ran, key=str) == [1, 2, None]


def captured_wrongly(caplog: pytest.LogCaptureFixture, session: Session, device: CountingDeviceMemory) -> str:
    """Check that the model works without graphs. Return the warning."""
    x = fp32(2, 3)
    assert session.run({"x": x})["y"].tolist() == (x * 2).tolist()
    assert session.graphs is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    return record.getMessage()


def test_a_graph_that_ignores_new_inputs_is_detected(
    capture: Capture, device: CountingDeviceMemory, caplog: pytest.LogCaptureFixture
) -> None:
    session, _ = capture(small.twice, stale=True)
    assert not session.capture(shapes(2), pads=True)
    message = captured_wrongly(caplog, session, device)
    assert "is served without CUDA graphs: captured, its output 'y' differs: by " in message


@pytest.mark.parametrize(
    ("build", "captured", "message"),
    [
        (lambda path: small.echo(path, "BYTES"), {"x": (2, 3)}, "strings are not on the device"),
        (small.reshaped_conv, {"image": (2, 1, 8, 8)}, ""),
        (small.found, {"x": (2, 3)}, "the shape of output 'at' is only known once the model has run"),
    ],
)
def test_models_that_cannot_be_captured_are_reported(
    build: Callable[[Path], Path],
    captured: Mapping[str, Shape],
    message: str,
    capture: Capture,
    caplog: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, _ = capture(build)
    failed = weakref.ref(session._session._sess)
    freed: list[bool] = []

    def opened(*given: Any) -> Any:
        freed.append(failed() is None)
        return open_session(*given)

    monkeypatch.setattr("tensorferry.server.runtime.session.open_session", opened)
    assert session.capture([captured], pads=True) == (not message)
    assert message in caplog.text
    assert freed == ([True] if message else []), "the device would have to hold both sessions"
