"""A first axis fixed to 1 becomes variable only where the rows stay independent, and one row's answers stay the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from support.models.small import node, save, value

from tensorferry.server.onnx_graph import analyse_batching
from tensorferry.server.onnx_graph.analysis import RowMixing
from tensorferry.server.onnx_graph.rewriting.free_rows import FreedRows, NotFreed, free_rows, write_freed

Graph = tuple[list[onnx.NodeProto], list[Any], list[Any], Mapping[str, Any]]


def i64(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def weights(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def lstm(dims: list[Any], *states: str) -> Graph:
    """An LSTM of 8 units along axis 0, which may begin with constant states; its last hidden state is the output."""
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r", "b", "", *states], ["", "h_out", ""], hidden_size=8),
        node("Squeeze", "h_out zero", "y"),
    ]
    constants = {
        "w": weights(1, 32, 4),
        "r": weights(1, 32, 8),
        "b": weights(1, 64),
        "zero": i64(0),
        **{name: np.zeros((1, 1, 8), np.float32) for name in states},
    }
    return nodes, [dims], [[1, 8]], constants


# Each must be refused. Dimensions of the inputs x (and z) and of the output y.
TRAPS: dict[str, Graph] = {
    "softmax over the rows": ([node("Softmax", "x", "y", axis=0)], [[1, 8]], [[1, 8]], {}),
    "class token": (
        [node("Concat", "token x", "y", axis=1)],
        [[1, 4, 8]],
        [[1, 5, 8]],
        {"token": weights(1, 1, 8)},
    ),
    "class token, expanded to one row": (
        [node("Expand", "token one", "e"), node("Concat", "e x", "y", axis=1)],
        [[1, 4, 8]],
        [[1, 5, 8]],
        {"token": weights(1, 1, 8), "one": i64(1, 1, 8)},
    ),
    "resize to sizes": (
        [helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], mode="nearest")],
        [[1, 3, 4, 4]],
        [[1, 3, 8, 8]],
        {"sizes": i64(1, 3, 8, 8)},
    ),
    "squeeze drops the rows": (
        [node("Squeeze", "x zero", "s"), node("MatMul", "s w", "m"), node("Unsqueeze", "m zero", "y")],
        [[1, 4, 8]],
        [[1, 4, 3]],
        {"zero": i64(0), "w": weights(8, 3)},
    ),
    "gather drops the rows": (
        [
            node("Gather", "x first", "g", axis=0),
            node("MatMul", "g w", "m"),
            node("Unsqueeze", "m zero", "y"),
        ],
        [[1, 4, 8]],
        [[1, 4, 3]],
        {"first": np.int64(0), "zero": i64(0), "w": weights(8, 3)},
    ),
    "reshape drops the rows": (
        [node("Reshape", "x flat", "r"), node("MatMul", "r w", "m"), node("Reshape", "m back", "y")],
        [[1, 4, 8]],
        [[1, 4, 3]],
        {"flat": i64(4, 8), "back": i64(1, 4, 3), "w": weights(8, 3)},
    ),
    "constant reshaped to one row, joined": (
        [node("Reshape", "c one", "r"), node("Concat", "r x", "y", axis=1)],
        [[1, 24]],
        [[1, 48]],
        {"c": weights(4, 6), "one": i64(1, 24)},
    ),
    "constant state of one row": lstm([5, 1, 4], "h", "c"),
    "rows on axis 1 of a fixed sequence": lstm([5, 1, 4]),
    "sequence of length 1 on axis 0": lstm([1, 1, 4]),
    "output without rows": ([node("ReduceSum", "x", "y", keepdims=1)], [[1, 8]], [[1, 1]], {}),
    "rows compared with each other": (
        [node("Transpose", "x", "t", perm=[1, 0]), node("MatMul", "x t", "y")],
        [[1, 8]],
        [[1, 1]],
        {},
    ),
}

# Each must be proved.
FREE: dict[str, Graph] = {
    "convolution and flatten": (
        [node("Conv", "x k", "c"), node("Reshape", "c flat", "f"), node("MatMul", "f w", "y")],
        [[1, 1, 4, 4]],
        [[1, 3]],
        {"k": weights(2, 1, 3, 3), "flat": i64(1, 8), "w": weights(8, 3)},
    ),
    "heads of attention": (
        [
            node("Reshape", "x heads", "r"),
            node("Transpose", "r", "t", perm=[0, 2, 1, 3]),
            node("Transpose", "t", "u", perm=[0, 2, 1, 3]),
            node("Reshape", "u merged", "y"),
        ],
        [[1, 4, 8]],
        [[1, 4, 8]],
        {"heads": i64(1, 4, 2, 4), "merged": i64(1, -1, 8)},
    ),
    "constant reshaped to one row, added": (
        [node("Reshape", "c one", "r"), node("Add", "x r", "y")],
        [[1, 24]],
        [[1, 24]],
        {"c": weights(4, 6), "one": i64(1, 24)},
    ),
    "two inputs": ([node("Add", "x z", "y")], [[1, 3], [1, 3]], [[1, 3]], {}),
    "target with the number of rows": (
        [
            node("Shape", "x", "s", start=0, end=1),
            node("Mul", "s two", "heads"),
            node("Concat", "heads minus four", "target", axis=0),
            node("Reshape", "x target", "r"),
            node("Concat", "s minus", "back", axis=0),
            node("Reshape", "r back", "y"),
        ],
        [[1, 4, 2, 4]],
        [[1, 32]],
        {"two": i64(2), "minus": i64(-1), "four": i64(4)},
    ),
    "target with a size of the input": (
        [
            node("Shape", "x", "s", start=1, end=2),
            node("Concat", "one s two four", "target", axis=0),
            node("Reshape", "x target", "y"),
        ],
        [[1, "n", 8]],
        [[1, "n", 2, 4]],
        {"one": i64(1), "two": i64(2), "four": i64(4)},
    ),
}


def saved(folder: Path, graph: Graph) -> Path:
    nodes, inputs, outputs, constants = graph
    return save(
        folder / "m.onnx",
        nodes,
        [value(name, dims=dims) for name, dims in zip("xz", inputs, strict=False)],
        [value("y", dims=dims) for dims in outputs],
        constants,
    )


def freed_file(path: Path, target: Path) -> Path:
    write_freed(path, free_rows(path), target)
    return target


@pytest.mark.parametrize("name", TRAPS)
def test_a_graph_whose_rows_would_mix_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotFreed) as refused:
        free_rows(saved(tmp_path, TRAPS[name]))
    assert refused.value.reasons


@pytest.mark.parametrize("name", FREE)
def test_rows_together_get_the_answers_of_the_file(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, FREE[name])
    target = freed_file(path, tmp_path / "free.onnx")
    own, free = onnxruntime.InferenceSession(path), onnxruntime.InferenceSession(target)
    shapes = {
        one.name: [5 if isinstance(size, str) else size for size in one.shape] for one in own.get_inputs()
    }
    generator = np.random.default_rng(1)
    rows = [
        {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(3)
    ]
    alone = [own.run(None, row)[0] for row in rows]
    (together,) = free.run(None, {name: np.concatenate([row[name] for row in rows]) for name in shapes})
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-6)
    for row, answer in zip(rows, alone, strict=True):
        np.testing.assert_allclose(free.run(None, row)[0], answer, rtol=1e-6)


def test_targets_are_changed_only_where_the_graph_is_not_proved_without(tmp_path: Path) -> None:
    assert free_rows(saved(tmp_path, FREE["constant reshaped to one row, added"])) == FreedRows(("x",))
    freed = free_rows(saved(tmp_path, FREE["heads of attention"]))
    assert freed.reshapes == (("r", (0, 4, 2, 4)), ("y", (0, -1, 8)))


def test_targets_that_are_constant_but_for_the_rows_are_not_computed_in_each_run(tmp_path: Path) -> None:
    """ONNX Runtime computes them once for the file, because its shapes are fixed."""
    path = saved(tmp_path, FREE["target with the number of rows"])
    assert free_rows(path).reshapes == (("r", (-1, 4, 4)), ("y", (-1, 32)))
    model = onnx.load(freed_file(path, tmp_path / "free.onnx"))
    assert [one.op_type for one in model.graph.node] == ["Reshape", "Reshape"]


def test_shapes_of_inner_tensors_and_graphs_are_left_out(tmp_path: Path) -> None:
    """They say that there is one row, which is not so."""
    outputs = [[helper.make_tensor_value_info("b", 1, [1, 3])] for _ in range(2)]
    then, other = (
        helper.make_graph([node(kind, "a", "b")], kind, [], [out], value_info=[])
        for kind, (out,) in zip(("Neg", "Abs"), outputs, strict=True)
    )
    path = save(
        tmp_path / "m.onnx",
        [node("Mul", "x two", "a"), node("If", "flag", "y", then_branch=then, else_branch=other)],
        [value("x", dims=[1, 3])],
        [value("y", dims=[1, 3])],
        {"two": np.float32(2), "flag": np.array(True)},
    )
    model = onnx.load(path)
    model.graph.value_info.append(helper.make_tensor_value_info("a", 1, [1, 3]))
    onnx.save(model, path)
    target = freed_file(path, tmp_path / "free.onnx")
    assert analyse_batching(target, ["x"]).finding is RowMixing.SEPARATE
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(onnxruntime.InferenceSession(target).run(None, {"x": x})[0], -2 * x)


def test_weights_in_other_files_are_found_by_the_copy(tmp_path: Path) -> None:
    path = saved(tmp_path, FREE["convolution and flatten"])
    onnx.save(onnx.load(path), path, save_as_external_data=True, size_threshold=64, location="own.weights")
    (tmp_path / "copy").mkdir()
    target = freed_file(path, tmp_path / "copy" / "m.onnx")
    x = weights(3, 1, 4, 4)
    (got,) = onnxruntime.InferenceSession(target).run(None, {"x": x})
    own = onnxruntime.InferenceSession(path)
    np.testing.assert_allclose(
        got, np.concatenate([own.run(None, {"x": x[at : at + 1]})[0] for at in range(3)]), rtol=1e-6
    )
    # Beside the model, its own weights serve both.
    freed_file(path, tmp_path / "beside.onnx")
    assert onnxruntime.InferenceSession(tmp_path / "beside.onnx").run(None, {"x": x})[0].shape == (3, 3)


def test_weights_outside_the_models_folder_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, FREE["convolution and flatten"])
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    onnx.save(model, path)
    with pytest.raises(NotFreed, match=r"'\.\./secret' is outside"):
        write_freed(path, FreedRows(("x",)), tmp_path / "free.onnx")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Encrypted models, and those in ONNX Runtime's own format."""
    encrypted, own = tmp_path / "m.onnx", tmp_path / "m.ort"
    for path in (encrypted, own):
        path.write_bytes(b"\x99" * 64)
        with pytest.raises(NotFreed, match=r"is not an ONNX model|own format"):
            free_rows(path)
    with pytest.raises(NotFreed, match="cannot be read"):
        free_rows(tmp_path / "missing.onnx")


def test_a_file_that_protobuf_cannot_hold_is_refused(tmp_path: Path) -> None:
    large = tmp_path / "m.onnx"
    with large.open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(NotFreed, match="larger than 2 GB"):
        free_rows(large)


def test_weights_listed_as_inputs_keep_their_axis(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.onnx",
        [node("Mul", "x w", "y")],
        [value("x", dims=[1, 3])],
        [value("y", dims=[1, 3])],
        {"w": weights(1, 3)},
    )
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("w", 1, [1, 3]))
    onnx.save(model, path)
    assert free_rows(path) == FreedRows(("x",))


def test_the_axis_has_a_name_of_its_own(tmp_path: Path) -> None:
    path = saved(tmp_path, ([node("Neg", "x", "y")], [[1, "batch"]], [[1, "batch"]], {}))
    model = onnx.load(freed_file(path, tmp_path / "free.onnx"))
    dims = [dim.dim_param for dim in model.graph.input[0].type.tensor_type.shape.dim]
    assert dims == ["batch_", "batch"]
