"""Outputs with rows of different lengths: padded within the request, then planned with the next stage's padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support.batcher.pipelines import Puppets, count_up, kind, send
from support.batcher.rig import result

from tensorferry.batcher import Batcher, ModelOutputError, Padding, PadInput, Pipeline, Stage, stack_rows


def test_strings_keep_their_nuls_at_the_end() -> None:
    assert stack_rows(["a\0", "b"], "an output").tolist() == ["a\0", "b"]
    assert stack_rows([[b"a\0"], [b"b", b"\0"]], "an output").tolist() == [[b"a\0", b""], [b"b", b"\0"]]


class Model:
    """A model that keeps the shapes of its batches, and sums what the mask leaves."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        self.batches.append(inputs["ids"].tolist())
        return {"sum": (inputs["ids"] * inputs["mask"]).sum(axis=1), "ids": inputs["ids"]}


PADDING = Padding((4, 8), {"ids": PadInput(1, -1), "mask": PadInput(1, False)}, outputs={"ids": 1})


def pipeline_of(
    puppets: Puppets,
    model: Any,
    padding: Padding | None,
    outputs: Any = ("sum",),
    function: Any = count_up,
) -> Pipeline:
    return puppets.pipeline(
        Stage(
            "tokens", puppets.batcher("tokens", function, gated=False), {"x": "x"}, {"ids": "t", "mask": "m"}
        ),
        Stage(
            "model",
            Batcher(model, name="model", clock=puppets.clock),
            {"ids": "t", "mask": "m"},
            {"sum": "sum", "ids": "ids"},
            padding=padding,
        ),
        outputs=outputs,
    )


def test_then_they_are_padded_to_the_lengths_of_the_stage_and_cut_back(puppets: Puppets) -> None:
    model = Model()
    with pipeline_of(puppets, model, PADDING, ("sum", "ids")) as pipeline:
        answers = result(pipeline.submit_rows({"x": [3.0, 2.0]}))
    assert model.batches == [[[1, 2, 3, -1], [1, 2, -1, -1]]]
    assert answers["sum"].tolist() == [6, 3]
    assert answers["ids"].tolist() == [[1, 2, 3], [1, 2, -1]]


class PadsWithFives(list[Any]):
    """Rows that pad themselves."""

    def __getitem__(self, index: Any) -> Any:
        return PadsWithFives(super().__getitem__(index))

    def __array__(self, *_: Any, **__: Any) -> Any:
        return stack_rows(list(self), "rows", 5)


@pytest.mark.parametrize(("padding", "expected"), [(None, 5), (PADDING, -1)])
def test_the_value_of_the_stage_comes_before_that_of_the_list(
    puppets: Puppets, padding: Any, expected: int
) -> None:
    def ids(inputs: Mapping[str, Any]) -> Any:
        return {name: PadsWithFives(rows) for name, rows in count_up(inputs).items()}

    model = Model()
    pipeline = pipeline_of(puppets, model, padding, function=ids)
    result(pipeline.submit_rows({"x": [3.0, 2.0]}))
    pipeline.close()
    assert [row[:3] for row in model.batches[0]] == [[1, 2, 3], [1, 2, expected]]


def test_an_output_of_the_pipeline_is_an_array(puppets: Puppets) -> None:
    stage = Stage("tokens", puppets.batcher("tokens", count_up, gated=False), {"x": "x"}, {"ids": "y"})
    pipeline = puppets.pipeline(stage)
    assert result(pipeline.submit_rows({"x": [2.0, 1.0]}))["y"].tolist() == [[1, 2], [1, 0]]


def test_what_the_next_stage_cannot_pad_is_the_models_fault(puppets: Puppets) -> None:
    model = Model()
    pipeline = pipeline_of(puppets, model, Padding((8,), {"ids": PadInput(1, 0.5)}))
    recorder = send(pipeline, [1.0, 1.0])[1]
    assert kind(recorder) == "ModelOutputError"
    assert "stage 'model'" in str(recorder.only.error)
    pipeline.close()


@pytest.mark.parametrize(
    ("rows", "pad", "expected"),
    [
        ([1, 2, 3], None, [1, 2, 3]),
        ([[1, 2], [3, 4]], 7, [[1, 2], [3, 4]]),
        ([[1], [3, 4], []], 7, [[1, 7], [3, 4], [7, 7]]),
        ([np.ones((2, 1)), np.ones((2, 3))], 5.0, [[[1, 5, 5]] * 2, [[1, 1, 1]] * 2]),
        ([np.ones((1, 2)), np.ones((2, 2))], None, [[[1, 1], [0, 0]], [[1, 1], [1, 1]]]),
        ([np.ones((1, 2)), np.ones((2, 1))], None, [[[1, 1], [0, 0]], [[1, 0], [1, 0]]]),
        ([["a"], ["b", "c"]], None, [["a", ""], ["b", "c"]]),
        ([np.array([b"a"], object), np.array([b"b", b"c"], object)], None, [[b"a", b""], [b"b", b"c"]]),
        ([np.array([], object), np.array([b"b"], object)], None, [[b""], [b"b"]]),
        ([["a"], ["b", "c"]], "[PAD]", [["a", "[PAD]"], ["b", "c"]]),
        ([], None, []),
    ],
)
def test_rows_are_stacked(rows: Any, pad: Any, expected: Any) -> None:
    assert stack_rows(rows, "output 'y'", pad).tolist() == expected


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([np.ones(2), np.ones((2, 3))], ["1 axes", "2 axes"]),
        ([np.ones(2), np.ones(2, np.float32)], ["float32", "float64"]),
        ([[1], [1.5]], ["float64", "int64"]),
        ([[[1], [2, 3]], [[1, 2], [3]]], ["not an array"]),
    ],
)
def test_rows_that_cannot_be_stacked_are_described(rows: Any, words: list[str]) -> None:
    with pytest.raises(ModelOutputError, match="output 'y'") as caught:
        stack_rows(rows, "output 'y'")
    assert all(word in str(caught.value) for word in words)
