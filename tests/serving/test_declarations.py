"""Declarations: what they hold, and what is refused with a message that says what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pytest

from tensorferry import serving
from tensorferry.protos.tensors import DATATYPES
from tensorferry.serving import (
    FP32,
    DeclarationError,
    FunctionModel,
    PipelineModel,
    TensorDatatype,
    model,
    onnx,
    pipeline,
    step,
)

_X = {"x": FP32[-1, 4]}
_Y = {"y": FP32[-1]}


@model(inputs=_X, outputs=_Y)
def total(x: Any) -> Any:
    return x.sum(axis=1)


def test_there_is_a_datatype_for_each_of_the_protocol_that_numpy_has() -> None:
    declared = [
        each.datatype for each in vars(serving).values() if isinstance(each, TensorDatatype) and not each.text
    ]
    assert sorted(declared) == sorted(set(DATATYPES) - {"BF16"})


@pytest.mark.parametrize("dim", [0, -2, "", True, 1.5, None])
def test_a_bad_dimension_is_refused(dim: Any) -> None:
    with pytest.raises(DeclarationError, match=r"a dimension of FP32\[...\] is .*; it must be a size"):
        FP32[-1, dim]


def test_a_size_may_be_an_integer_of_numpy() -> None:
    assert FP32[-1, np.int64(4)] == FP32[-1, 4]


def test_a_declared_function_is_still_a_function() -> None:
    assert isinstance(total, FunctionModel)
    assert total.name == "total"
    assert total(np.ones((2, 4))).tolist() == [4.0, 4.0]


def test_types_come_from_annotations() -> None:
    @model
    def double(x: Annotated[npt.NDArray[np.float32], FP32[-1]], factor: int = 2) -> FP32[-1]:  # type: ignore[valid-type]
        return x * factor

    assert double.inputs == {"x": FP32[-1]}
    assert double.outputs == {"output": FP32[-1]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": {}}, "declares no inputs"),
        ({"outputs": {}}, "declares no outputs"),
        ({"inputs": {"x": np.float32}}, "write a type such as"),
        ({"inputs": {"x": FP32[4]}}, "axis 0 counts rows and must be -1"),
        ({"workers": 0}, "workers is 0; it must be an integer of at least 1"),
        ({"processes": -1}, "processes is -1"),
        ({"max_batch_size": True}, "max_batch_size is True"),
        ({"max_batch_size": 1 << 40}, "max_batch_size is 1099511627776; it must be at most 1048576"),
        ({"workers": 2, "processes": 2}, "give one of both"),
        ({"batched": False, "max_batch_size": 4}, "takes one row at a time"),
        ({"processes": 2, "steady": True}, "is not steady; leave out `steady`"),
        ({"example": {"z": 1}}, "must have an array for each input"),
        ({"name": "a/b"}, "give another `name`"),
        ({"inputs": {1: FP32[-1]}}, "the name 1 in `inputs` is no name; give a str"),
    ],
)
def test_a_bad_function_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        model(**{"inputs": _X, "outputs": _Y, "name": "m", **arguments})(lambda x: x)


async def _coroutine(x: Any) -> Any:
    return x


def _generator(x: Any) -> Any:
    yield x


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (_generator, {}, "yields, but is not declared with streams=True"),
        (_coroutine, {"streams": True}, "is an `async def` without `yield`"),
        (_generator, {"streams": True, "max_batch_size": 4}, "leave out max_batch_size and batched"),
        (_generator, {"streams": True, "batched": False}, "leave out max_batch_size and batched"),
        (_generator, {"streams": True, "steady": True}, "is not steady; leave out `steady`"),
    ],
)
def test_a_bad_generator_is_refused(function: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        model(**{"inputs": _X, "outputs": _Y, "name": "m", **arguments})(function)


def test_an_asynchronous_load_is_refused() -> None:
    class Loads:
        async def load(self) -> None:
            pass

        def __call__(self, x: Any) -> Any:
            return x

    with pytest.raises(DeclarationError, match="`load` is an `async def`, which is never awaited"):
        model(inputs=_X, outputs=_Y)(Loads)


def test_a_generator_needs_no_axis_of_rows_and_is_no_step() -> None:
    @model(inputs={"x": FP32[4]}, outputs={"y": FP32[()]}, streams=True)
    class Generator:
        def __call__(self, x: Any) -> Any:
            yield x.sum()

    assert Generator.max_batch_size == 0  # type: ignore[attr-defined]
    with pytest.raises(DeclarationError, match="answers in streams, which only a model by itself can do"):
        pipeline("p", Generator)  # type: ignore[arg-type]


def test_annotations_that_fail_are_refused() -> None:
    with pytest.raises(DeclarationError, match="the annotations of 'wrong' cannot be read"):

        @model
        def wrong(x: missing) -> None:  # type: ignore[name-defined]  # noqa: F821
            return None


def test_a_pipeline_is_made_of_steps_models_and_names() -> None:
    encoder = onnx("models/encoder.onnx", pad_lengths=("seq", [16, 32]), pad_values={"ids": 0})
    embed = pipeline("embed", total, step(encoder, inputs={"ids": "y"}), "other", outputs=["vector"])
    assert isinstance(embed, PipelineModel)
    assert [each.name for each in embed.steps] == ["total", "encoder", "other"]
    assert encoder.path == Path("models/encoder.onnx")
    assert encoder.pad_lengths == ("seq", (16, 32))
    assert embed.outputs == ("vector",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_batch_size": "8"}, "max_batch_size is '8'; it must be an integer of at least 0"),
        (
            {"pad_lengths": ("seq", [32, 16])},
            "pad_lengths is .*; it must be the name of an axis, and ascending",
        ),
        ({"pad_lengths": ("seq", [0, 16])}, "pad_lengths is"),
        ({"pad_lengths": ("seq", [])}, "pad_lengths is"),
        ({"pad_lengths": ("seq", ["16"])}, "pad_lengths is"),
        ({"pad_lengths": "seq=16,32"}, "pad_lengths is 'seq=16,32'"),
        ({"pad_lengths": (1, [16])}, "pad_lengths is"),
    ],
)
def test_bad_settings_of_onnx_files_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=f"model 'm': {message}"):
        onnx("m.onnx", **settings)


def test_bad_pipelines_are_refused() -> None:
    with pytest.raises(DeclarationError, match="has no steps"):
        pipeline("p")
    with pytest.raises(DeclarationError, match="must be made by model, onnx or step"):
        pipeline("p", lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="has no outputs"):
        pipeline("p", total, outputs=[])
    with pytest.raises(DeclarationError, match=r"outputs='y', which is a text; give a list: \['y'\]"):
        pipeline("p", total, outputs="y")
    with pytest.raises(DeclarationError, match=r"outputs=\['y', 'y'\]; name each tensor once"):
        pipeline("p", total, outputs=["y", "y"])
    with pytest.raises(DeclarationError, match="a model is named"):
        step("no/name")
    with pytest.raises(DeclarationError, match="pad_values without pad_lengths"):
        onnx("m.onnx", pad_values={"x": 0})
