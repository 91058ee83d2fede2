"""The inputs and outputs of a configuration must fit those of the ONNX file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.server.rig import fp32, reproducible, signature, spec

from tensorferry.server.errors import ModelConfigError, ModelFailedError
from tensorferry.server.models.config_pbtxt.io_mapping import IoMapping, Reshape, io_mapping_of
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.signature import Signature

BATCHED = signature(
    spec("x", "FP32", "batch", 3, "n"), spec("t", "BYTES", "batch"), outputs=(spec("y", "FP32", "batch", 6),)
)
FIXED = signature(spec("x", "FP32", 2, 3), spec("c", "INT32"), outputs=(spec("y", "FP32", "a", 3),))

X = 'input { name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] }'
T = 'input { name: "t" data_type: TYPE_STRING dims: 1 reshape { shape: [ ] } }'
Y = 'output { name: "y" data_type: TYPE_FP32 dims: 6 }'


def io_mapping(text: str, onnx: Signature = BATCHED, most: int = 8) -> IoMapping:
    config = parse_config(text, "test")
    config.name, config.max_batch_size = "m", most
    return io_mapping_of(config, onnx)


def test_clients_see_the_tensors_of_the_configuration_in_its_order() -> None:
    found = io_mapping(T + X.replace("-1", "7") + Y)
    assert str(found.signature) == "(t: BYTES[-1, 1], x: FP32[-1, 3, 7]) -> (y: FP32[-1, 6])"
    assert found.inputs == {"t": Reshape((1,), (), True)}
    assert found.outputs == {}


def test_dynamic_dimensions_keep_their_names() -> None:
    assert io_mapping(X + T + Y).signature.inputs[0].dims == ("batch", 3, "n")
    reshaped = 'input { name: "x" data_type: TYPE_FP32 dims: [ 1, 3, -1 ] reshape { shape: [ 3, -1 ] } }'
    assert io_mapping(reshaped + T + Y).signature.inputs[0].dims == ("batch", 1, 3, "")


def test_binary_inputs_stay_binary() -> None:
    onnx = signature(spec("t", "BYTES", "b", binary=True), outputs=(spec("y", "FP32", "b", 6),))
    assert [s.binary for s in io_mapping(T + Y, onnx).signature.inputs] == [True]


def test_only_listed_outputs_are_served() -> None:
    onnx = signature(spec("x", "FP32", "b"), outputs=(spec("y", "FP32", "b"), spec("z", "FP32", "b")))
    tensor = '{ name: "%s" data_type: TYPE_FP32 dims: 1 reshape { } }'
    assert [
        s.name for s in io_mapping(f"input {tensor % 'x'} output {tensor % 'z'}", onnx).signature.outputs
    ] == ["z"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (X + Y, "configuration expects 1 inputs, model provides 2: x, t"),
        (X + T.replace('"t"', '"u"') + Y, "unexpected inference input 'u' in the configuration of model 'm', allowed inputs are: x, t"),
        (
            X.replace("FP32", "FP16") + T + Y,
            "unable to load model 'm', configuration expects datatype TYPE_FP16 for input 'x', model provides TYPE_FP32",
        ),
        (
            X.replace("3, -1", "4, -1") + T + Y,
            "model 'm', tensor 'x': the model expects 3 dimensions (shape [-1, 3, -1]) but the model configuration "
            "specifies 3 dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit "
            "tensor shape, making complete shape [-1, 4, -1])",
        ),
        (X + T + Y.replace("6", "-1"), "tensor 'y': the model expects 2 dimensions (shape [-1, 6])"),
        (X + T.replace(" reshape { shape: [ ] }", "") + Y, "making complete shape [-1, 1]"),
        (
            X.replace("3, -1", "3, 0") + T + Y,
            "model input 'x' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m, got "
            "[3, 0]",
        ),
        (X + T.replace("dims: 1 ", "") + Y, "model input 't' must specify 'dims' for m, since it has a reshape"),
        (
            X.replace("}", "reshape { shape: [ -1, 2 ] } }") + T + Y,
            "has different size for dims and reshape for m",
        ),
        (X.replace("}", "format: FORMAT_NCHW }") + T + Y, "model input NHWC/NCHW require 3 dims for m"),
    ],
)  # fmt: skip
def test_an_error_names_both_sides(text: str, message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        io_mapping(text)
    assert message in str(caught.value)


def test_a_dimension_of_0_is_allowed_if_the_file_has_it() -> None:
    onnx = signature(
        spec("x", "FP32", "batch", 0),
        spec("c", "INT32", "batch", 3),
        outputs=(spec("y", "FP32", "batch", 0),),
    )
    text = (
        'input { name: "x" data_type: TYPE_FP32 dims: 0 } input { name: "c" data_type: TYPE_INT32 dims: %d } '
        'output { name: "y" data_type: TYPE_FP32 dims: 0 }'
    )
    assert io_mapping(text % 3, onnx).signature == onnx
    with pytest.raises(ModelConfigError, match=r"input 'c' dimension must be integer >= 1"):
        io_mapping(text % 0, onnx)


UNBATCHED = (
    'input { name: "x" data_type: TYPE_FP32 dims: [ %s ] } input { name: "c" data_type: TYPE_INT32 dims: [ %s ] } '
    'output { name: "y" data_type: TYPE_FP32 dims: [ %s ] }'
)


def test_unbatched_dims_are_complete_and_a_scalar_has_dims_1() -> None:
    found = io_mapping(UNBATCHED % ("2, 3", "1", "-1, 3"), FIXED, most=0)
    assert str(found.signature) == "(x: FP32[2, 3], c: INT32[1]) -> (y: FP32[-1, 3])"
    assert found.inputs == {"c": Reshape((1,), (), False)}


@pytest.mark.parametrize(
    ("dims", "most", "message"),
    [
        (("2, 3", "2", "-1, 3"), 0, "scalar tensor 'c', should only provide 1 in the model configuration"),
        (("2, 3", "1", "2, 3"), 0, "tensor 'y': the model expects 2 dimensions (shape [-1, 3])"),
        (
            ("2, 3", "1 ] reshape { } dims: [ ", "-1, 3"),
            0,
            "cannot have empty reshape for non-batching model",
        ),
        (
            ("3", "1", "6"),
            8,
            "model 'm', tensor 'x': for the model to support batching the shape should have at least 1 dimension and the "
            "first dimension must be -1; but shape expected by the model is [2, 3]",
        ),
    ],
)
def test_dims_of_a_file_without_a_batch_axis_must_fit(dims: tuple[str, ...], most: int, message: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        io_mapping(UNBATCHED % dims, FIXED, most=most)
    assert message in str(caught.value)


# Running the model.


def test_an_output_that_does_not_fit_its_reshape_is_an_error_with_both_shapes() -> None:
    found = IoMapping(BATCHED, {}, {"y": Reshape((2, 3), (6,), True)})
    with pytest.raises(ModelFailedError, match=r"'y' has shape \[4, 5\].*from \[6\] to \[2, 3\]"):
        found.runner(lambda inputs: {"y": fp32(4, 5)})({})


def test_an_output_of_unknown_shape_is_not_reshaped() -> None:
    found = IoMapping(FIXED, {}, {"y": Reshape((1,), (), False)})
    run: Any = found.runner(lambda inputs: {"y": inputs["x"]})
    assert run({"x": fp32()})["y"].shape == (1,)
    assert run({"x": fp32(2, 2)})["y"].shape == (2, 2)


dims = st.lists(st.sampled_from([-1, 1, 2, 3]), max_size=5)


@reproducible
@given(dims, st.lists(st.integers(1, 4), min_size=5, max_size=5), st.booleans(), st.data())
def test_reshaping_there_and_back_changes_nothing(
    wire: list[int], sizes: list[int], batched: bool, data: st.DataObject
) -> None:
    """Each run of fixed dimensions is split in any way, with dimensions of 1 inserted."""
    model: list[int] = []
    run: list[int] = []
    for dim in [*wire, -1]:
        if dim == -1:
            model += data.draw(st.sampled_from([run, [*run, 1], [int(np.prod(run))]]))
            model.append(-1)
            run = []
        else:
            run.append(dim)
    reshape = Reshape(tuple(wire), tuple(model[:-1]), batched)
    shape = tuple(size if dim == -1 else dim for dim, size in zip(wire, sizes, strict=False))
    array = fp32(*((7,) if batched else ()), *shape)
    there = reshape.to_model(array)
    assert np.array_equal(there.ravel(), array.ravel())
    assert [size for size, dim in zip(there.shape[batched:], reshape.model, strict=True) if dim == -1] == [
        size for size, dim in zip(shape, wire, strict=True) if dim == -1
    ]
    assert reshape.to_wire(there).shape == array.shape
