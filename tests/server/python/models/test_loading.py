"""A Python function is loaded: tried, checked, warmed up, and run by the usual batcher."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tensorferry.server.errors import InvalidRequestError, StartError, StepFailedError
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.serving import (
    BOOL,
    BYTES,
    FP32,
    INT64,
    STRING,
    UINT8,
    FunctionModel,
    InvalidInput,
    RowPadding,
    infer,
    model,
)

LoadFunction = Callable[..., Model]


@model(inputs={"x": FP32[-1, 2]}, outputs={"y": FP32[-1]})
def total(x: Any) -> Any:
    return x.sum(axis=1)


def test_a_function_is_a_batched_model(load: LoadFunction) -> None:
    served = load(total, max_batch_size=8)
    assert str(served) == "total(x: FP32[-1, 2]) -> (y: FP32[-1]), batches of up to 8 rows (tested)"
    assert (served.config.platform, served.config.max_batch_size) == ("python", 8)
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert served.batcher.submit_rows({"x": x}).result()["y"].tolist() == [1.0, 5.0, 9.0]


def test_an_output_may_have_the_name_of_an_input(load: LoadFunction) -> None:
    """So may those of an ONNX file, which passes an identifier on."""
    served = load(replace(total, outputs={"x": FP32[-1]}))
    assert served.batcher.submit_rows({"x": np.ones((3, 2), np.float32)}).result()["x"].tolist() == [2, 2, 2]


def test_strings_and_bytes_have_their_types(load: LoadFunction) -> None:
    @model(inputs={"text": STRING[-1], "blob": BYTES[-1]}, outputs={"both": STRING[-1], "sizes": INT64[-1]})
    def join(text: Any, blob: Any) -> Any:
        assert all(isinstance(one, str) for one in text)
        assert all(isinstance(one, bytes) for one in blob)
        return [a + b.decode("latin-1") for a, b in zip(text, blob, strict=True)], [len(one) for one in blob]

    served = load(join)
    assert [spec.binary for spec in served.signature.inputs] == [False, True]
    inputs = {"text": np.array(["ä"], object), "blob": np.array([b"\xff"], object)}
    answer = served.batcher.submit_rows(inputs).result()
    assert answer["both"].tolist() == ["äÿ"]
    assert answer["sizes"].tolist() == [1]


@pytest.mark.parametrize("element", ["ä", "ä".encode()], ids=["str", "bytes"])
@pytest.mark.parametrize("made", [list, partial(np.array, dtype=object), np.array])
def test_elements_of_outputs_have_their_declared_types(load: LoadFunction, element: Any, made: Any) -> None:
    """So a later function gets str of a STRING, and bytes of a BYTES."""

    @model(inputs={"n": INT64[-1]}, outputs={"text": STRING[-1], "blob": BYTES[-1]})
    def words(n: Any) -> Any:
        return made([element] * len(n)), made([element] * len(n))

    answer = load(words).batcher.submit_rows({"n": np.array([1, 2])}).result()
    assert answer["text"].tolist() == ["ä"] * 2
    assert answer["blob"].tolist() == ["ä".encode()] * 2


def test_one_row_at_a_time(load: LoadFunction) -> None:
    shapes: list[Any] = []

    @model(inputs={"x": FP32[2], "name": STRING[()]}, outputs={"y": FP32[()]}, batched=False)
    def row(x: Any, name: Any) -> Any:
        shapes.append((x.shape, type(name)))
        return x.sum()

    served = load(row)
    assert served.max_batch_size == 1
    assert str(served.signature) == "(x: FP32[-1, 2], name: BYTES[-1]) -> (y: FP32[-1])"
    inputs = {"x": np.ones((3, 2), np.float32), "name": np.array(["a", "b", "c"], object)}
    assert served.batcher.submit_rows(inputs).result()["y"].tolist() == [2.0, 2.0, 2.0]
    assert set(shapes) == {((2,), str)}


def test_a_class_is_loaded_once_for_each_worker(load: LoadFunction) -> None:
    made: list[str] = []

    @model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, workers=2)
    class Scaled:
        def load(self) -> None:
            made.append("loaded")
            self.factor = 3

        def __call__(self, x: Any) -> Any:
            return x * np.float32(self.factor)

    served = load(Scaled)
    assert made == ["loaded", "loaded"]
    assert served.devices == ("cpu", "cpu")
    assert served.batcher.submit_rows({"x": np.ones(2, np.float32)}).result()["y"].tolist() == [3.0, 3.0]


def test_rows_of_different_lengths_are_padded_for_each_request(load: LoadFunction) -> None:
    started, go_on = threading.Event(), threading.Event()

    @model(inputs={"n": INT64[-1]}, outputs={"ids": INT64[-1, -1], "word": STRING[-1, -1]})
    def count(n: Any) -> Any:
        if n[0] == 99:
            started.set()
            go_on.wait(60)
        return [np.arange(k) for k in n], [np.array(["w"] * k, object) for k in n]

    served = load(count)
    held = served.batcher.submit_rows({"n": np.array([99])})
    assert started.wait(60)
    # These two share a batch.
    first = served.batcher.submit_rows({"n": np.array([1, 2])})
    second = served.batcher.submit_rows({"n": np.array([4])})
    go_on.set()
    assert np.asarray(first.result()["ids"]).tolist() == [[0, 0], [0, 1]]
    assert np.asarray(first.result()["word"]).tolist() == [["w", ""], ["w", "w"]]
    assert np.asarray(second.result()["ids"]).tolist() == [[0, 1, 2, 3]]
    assert np.asarray(held.result()["ids"]).shape == (1, 99)


@pytest.mark.parametrize("lengths", [[0, 2], [1, 1, 3, 3], [3, 3, 1, 1], [0, 0, 2], [2, 2, 0], [1, 2, 0, 0]])
def test_batches_of_one_request_are_padded_together(load: LoadFunction, lengths: list[int]) -> None:
    elements = {"id": (1, 9), "word": ("w", ""), "blob": (b"x", b"")}

    def rows(n: Any) -> Any:
        return [np.ones(k, int) for k in n], *(
            [np.array([elements[name][0]] * k, object) for k in n] for name in ("word", "blob")
        )

    declared = FunctionModel(
        "rows",
        rows,
        {"n": INT64[-1]},
        {"id": INT64[-1, -1], "word": STRING[-1, -1], "blob": BYTES[-1, -1]},
        max_batch_size=2,
        row_padding=lambda: RowPadding((16,), {"id": 9}),
    )
    answer = load(declared).batcher.submit_rows({"n": np.array(lengths)}).result()
    for name, (element, pad) in elements.items():
        expected = [[element] * length + [pad] * (max(lengths) - length) for length in lengths]
        assert np.asarray(answer[name]).tolist() == expected


def test_a_function_of_one_row_may_return_any_length(load: LoadFunction) -> None:
    @model(inputs={"n": INT64[()]}, outputs={"y": STRING[-1]}, batched=False)
    def words(n: Any) -> Any:
        return np.array(["w"] * int(n), object)

    answer = load(words).batcher.submit_rows({"n": np.array([0, 1, 2])}).result()
    assert np.asarray(answer["y"]).tolist() == [["", ""], ["w", ""], ["w", "w"]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: x[:1], r"output 'y' has 1 rows \(shape \[1\]\), and its input has 2"),
        (lambda x: x.astype(np.float64), r"output 'y' has dtype float64, and is declared as FP32: convert it with"),
        (lambda x: x[:, None], r"output 'y' has shape \[1, 1\], and is declared as \[-1\]$"),
        (lambda x: x.mean(), r"output 'y' has shape \[\], and is declared as \[-1\]; give each row of the batch its own"),
        (lambda x: {"z": x}, r"it returned outputs \['z'\], and declares \['y'\]"),
        (lambda x: (x, x), r"it returned 2 outputs, and declares 1"),
        (lambda x: object(), r"output 'y' is of type object, which is no array of FP32"),
        (lambda x: [b"\xff"] * len(x), r"output 'y' has an element that is not UTF-8 .* declare it as BYTES"),
        *[
            (lambda x, value=value: [value] * len(x), "output 'y' is of type list, which is no array of UINT8")
            for value in (1.7, np.float64(255.9), 300, -1, "1")
        ],
    ],
)  # fmt: skip
def test_a_wrong_return_is_found_by_the_trial_run(load: LoadFunction, result: Any, message: str) -> None:
    output = STRING if "UTF-8" in message else UINT8 if "UINT8" in message else FP32
    declared = model(inputs={"x": FP32[-1]}, outputs={"y": output[-1]}, name="wrong")(result)
    with pytest.raises(StartError, match=f"model 'wrong', trial run: {message}"):
        load(declared)


def test_every_byte_of_a_returned_boolean_is_0_or_1(load: LoadFunction) -> None:
    """ONNX Runtime reads beyond its buffers if other bytes reach it."""

    @model(inputs={"x": UINT8[-1]}, outputs={"y": BOOL[-1], "rows": BOOL[-1, -1]})
    def mask(x: Any) -> Any:
        return x.view(bool), [x[:2].view(bool) for _ in x]

    given = np.array([2, 0, 1, 255], np.uint8)
    answer = load(mask).batcher.submit_rows({"x": given}).result()
    assert answer["y"].view(np.uint8).tolist() == [1, 0, 1, 1]
    assert np.asarray(answer["rows"]).view(np.uint8).tolist() == [[1, 0]] * 4


def test_a_function_that_refuses_random_input_is_checked_later(
    load: LoadFunction, caplog: pytest.LogCaptureFixture
) -> None:
    @model(inputs={"x": STRING[-1]}, outputs={"y": INT64[-1]})
    def picky(x: Any) -> Any:
        if x[0] != "good":
            raise InvalidInput(f"{x[0]!r} is not good")
        return np.ones(len(x), np.int32)

    with caplog.at_level(logging.INFO):
        served = load(picky)
    assert (
        "model picky raised InvalidInput: '1' is not good in its trial run on random input: " in caplog.text
    )
    assert "its rows were not compared" in caplog.text
    assert "give @model(example=...)" in caplog.text
    with pytest.raises(InvalidRequestError, match=r"^'bad' is not good$"):
        served.batcher.submit_rows({"x": np.array(["bad"], object)}).result()
    with pytest.raises(StepFailedError, match="output 'y' has dtype int32, and is declared as INT64"):
        served.batcher.submit_rows({"x": np.array(["good"], object)}).result()


def test_an_example_replaces_random_input(load: LoadFunction) -> None:
    seen: list[Any] = []

    @model(inputs={"x": STRING[-1]}, outputs={"y": INT64[-1]}, example={"x": [b"good"]}, max_batch_size=2)
    def picky(x: Any) -> Any:
        assert set(x) == {"good"}
        seen.append(len(x))
        return np.ones(len(x), np.int64)

    load(picky)
    assert set(seen) == {1, 2}


def test_an_example_must_fit(load: LoadFunction) -> None:
    declared = model(inputs={"x": FP32[-1, 2]}, outputs={"y": FP32[-1]}, example={"x": [1.0]}, name="m")(
        lambda x: x
    )
    with pytest.raises(
        StartError, match=r"the example of input 'x' has shape \[1\]; it must have at least one row"
    ):
        load(declared)
    with pytest.raises(StartError, match="the example of input 'x' is no array of INT64"):
        load(replace(declared, inputs={"x": INT64[-1]}, example={"x": [1.7]}))
    with pytest.raises(StartError, match=r"has shape \[1, 3\]; it must have .* and fit \[-1, 2\]"):
        load(replace(declared, example={"x": [[1.0, 2.0, 3.0]]}))


def test_an_exit_of_the_users_code_fails_the_load_with_an_answer(
    load: LoadFunction, caplog: pytest.LogCaptureFixture
) -> None:
    class Exits:
        def load(self) -> None:
            sys.exit("no GPU")

        def __call__(self, x: Any) -> Any:
            return x

    x, y = {"x": FP32[-1]}, {"y": FP32[-1]}
    with pytest.raises(StartError, match=r"model 'f' cannot be loaded:\n(.*\n)*SystemExit: no GPU"):
        load(model(name="f", inputs=x, outputs=y)(Exits))
    in_call = model(name="f", inputs=x, outputs=y)(lambda x: sys.exit("no GPU"))
    load(in_call)
    assert "model f raised SystemExit: no GPU in its trial run on random input" in caplog.text
    with pytest.raises(StartError, match=r"raised on its own example:\n(.*\n)*SystemExit: no GPU"):
        load(replace(in_call, example={"x": [1.0]}))


def test_parameters_must_fit_the_inputs(load: LoadFunction) -> None:
    positional = model(inputs={"a.b": FP32[-1]}, outputs={"y": FP32[-1]}, name="positional")(
        lambda value: value
    )
    assert load(positional).batcher.submit_rows({"a.b": np.ones(1, np.float32)}).result()["y"].tolist() == [
        1.0
    ]
    declared = model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, name="m")(lambda a, b: a)
    with pytest.raises(StartError, match=r"has the inputs \['x'\], but its function takes \['a', 'b'\]"):
        load(declared)
    for function in (lambda x, scale: x, lambda a, *, scale: a, lambda scale, **others: scale):
        with pytest.raises(StartError, match="name its parameters as the inputs, and give others a default"):
            load(replace(declared, function=function))
    load(replace(declared, function=lambda x, scale=2: x))


@pytest.mark.parametrize("example", [None, {"x": [1.0]}])
def test_a_function_that_calls_other_models_is_not_tried(
    load: LoadFunction, caplog: pytest.LogCaptureFixture, example: Any
) -> None:
    @model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, example=example)
    def calling(x: Any) -> Any:
        return infer("other", x=x)["y"]

    with caplog.at_level(logging.INFO):
        load(calling)
    assert caplog.text.count("model calling calls model other, so it is not tried at load") == 1
    assert "random input" not in caplog.text
