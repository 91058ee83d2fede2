"""Calls with arrays: what fits a model, what is converted, and what an error says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support.server.calling_models import World, request
from support.server.rig import PATIENCE, signature, spec

from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.server.python.models.outputs import RaggedRows
from tensorferry.serving import InvalidInput, submit

MATRIX = signature(spec("x", "FP32", "batch", 2), outputs=(spec("y", "FP32", "batch", 2),))


def echo(inputs: Mapping[str, Any]) -> Any:
    return {"y": inputs["x"]}


def add_echo(world: World, datatype: str, *, binary: bool = False) -> None:
    x, y = (spec(name, datatype, "batch", binary=binary) for name in "xy")
    world.add("m", echo, signature(x, outputs=(y,)))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "expected 1 inputs but got 0 inputs for model 'm'"),
        (
            {"x": np.zeros((1, 2))},
            "inference input 'x' for model 'm' has dtype float64, but the model expects FP32: convert it with "
            ".astype('float32')",
        ),
        ({"x": np.zeros((1, 2), ">f4")}, "dtype >f4"),
        ({"x": np.float32(1)}, "has no shape but model 'm' requires a batch dimension"),
        ({"x": [[1.0], [1.0, 2.0]]}, "is of type list, which is no array of FP32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(world: World, inputs: Any, message: str) -> None:
    world.add("m", echo, MATRIX)
    with pytest.raises(InvalidInput) as refused:
        world.call("m", inputs)
    assert message in str(refused.value)


def test_a_function_may_change_its_arrays_after_it_has_cancelled_a_call(world: World) -> None:
    """The batch that has the cancelled request is yet to be joined: its input without rows is that of the others."""
    starting = ScriptedRunner(lambda batch: None, gated=True)
    shapes = signature(
        spec("x", "FP32", "batch"), spec("s", "FP32", 1), outputs=(spec("y", "FP32", "batch"),)
    )
    model = world.add("m", lambda inputs: {"y": inputs["x"] + inputs["s"]}, shapes, batch_started=starting)
    x, s = np.zeros(1, np.float32), np.full(1, 100, np.float32)
    with world.caller("caller", request()):
        first = submit("m", x=x, s=s)
        starting.await_batches(1)
        cancelled = submit("m", x=x, s=s)
        other = submit("m", x=x + 1, s=s.copy())
        starting.release()
        assert first.result(PATIENCE)["y"].tolist() == [100]
        starting.await_batches(2)
        assert cancelled.cancel()
        s[:] = -5000
        starting.open()
        assert other.result(PATIENCE)["y"].tolist() == [101]
    assert model.batcher.close()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_of_different_lengths_are_padded_in_the_answer(world: World, count: int) -> None:
    """Also if the request is split, and the parts have other longest rows."""
    shapes = signature(spec("x", "INT64", "batch"), outputs=(spec("y", "INT64", "batch", "length"),))

    def count_up(inputs: Mapping[str, Any]) -> Any:
        return {"y": RaggedRows([np.arange(length) for length in inputs["x"]], -1)}

    world.add("m", count_up, shapes, max_batch_size=2)
    lengths = [1, 3, 2, 2, 5][:count]
    answer = world.call("m", {"x": np.array(lengths)})["y"]
    longest = max(lengths)
    assert answer.tolist() == [[*range(length), *[-1] * (longest - length)] for length in lengths]


@pytest.mark.parametrize("value", [[[1, 2]], [[1.0, 2.0]], [(True, 2)]])
def test_lists_are_converted(world: World, value: Any) -> None:
    world.add("m", echo, MATRIX)
    found = world.call("m", {"x": value})["y"]
    assert found.dtype == np.float32
    assert found.tolist() == np.array(value, float).tolist()


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        ["ä", "b\0"],
        [b"\xc3\xa4", b"b\0"],
        np.array(["ä", "b\0"], object),
        np.array(["ä", b"b\0"], object)[::1],
    ],
)
def test_strings_are_text_or_bytes_as_the_model_takes_them(world: World, value: Any, binary: bool) -> None:
    add_echo(world, "BYTES", binary=binary)
    expected = ["ä".encode(), b"b\0"] if binary else ["ä", "b\0"]
    assert world.call("m", {"x": value})["y"].tolist() == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "an element of type int; elements are str or bytes"),
        (np.zeros(1), "has dtype float64, but the model expects str elements"),
    ],
)
def test_elements_that_are_no_strings_are_refused(world: World, value: Any, message: str) -> None:
    add_echo(world, "BYTES")
    with pytest.raises(InvalidInput, match=message):
        world.call("m", {"x": value})


def test_bf16_is_its_bits(world: World) -> None:
    add_echo(world, "BF16")
    assert world.call("m", {"x": np.array([16256], np.uint16)})["y"].tolist() == [16256]
    dtypes = pytest.importorskip("ml_dtypes")
    assert world.call("m", {"x": np.array([1], dtypes.bfloat16)})["y"].tolist() == [16256]


def test_no_rows_are_answered_without_a_run(world: World) -> None:
    def never(inputs: Any) -> Any:
        raise AssertionError

    world.add("m", never, MATRIX)
    found = world.call("m", {"x": np.zeros((0, 2), "f4")})["y"]
    assert (found.shape, found.dtype) == ((0, 2), np.float32)
