"""Which calls may be joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorferry.client import Coalesce, InferenceClient, InvalidInput, ModelMetadata, TensorMetadata
from tensorferry.client.coalescing.forms import SHARED_ROWS, Form, Forms, shared_rows
from tensorferry.client.messages import codec
from tensorferry.protos import inference_pb2 as pb

NOWHERE = "127.0.0.1:1"  # port 1 is never listened on
METADATA = (("x-key", "k"),)
OPTIONS: dict[str, Any] = {"metadata": METADATA, "wait_for_ready": None}
X = TensorMetadata("x", "FP32", (-1, 2))
W = TensorMetadata("w", "INT64", (-1,))
Y = TensorMetadata("y", "FP32", (-1, 2))


def model(*inputs: TensorMetadata, rows: str | None = "8", output: TensorMetadata = Y) -> ModelMetadata:
    properties = {} if rows is None else {SHARED_ROWS: rows}
    return ModelMetadata("m", ("1",), "p", inputs or (X,), (output,), properties)


MODEL, DEFAULT = model(), Coalesce()


def request(rows: int = 1, **options: Any) -> pb.ModelInferRequest:
    name, version = options.pop("model", "m"), options.pop("version", "")
    dtype, width = options.pop("dtype", np.float32), options.pop("width", 2)
    inputs = options.pop("inputs", {"x": np.zeros((rows, width), dtype)})
    chosen = codec.request_of(
        inputs, options.pop("request_id", None), options.pop("outputs", None), options.pop("parameters", None)
    )
    assert not options
    return codec.encode(name, version, chosen, None)


def form(
    message: pb.ModelInferRequest,
    timeout: float | None = None,
    options: dict[str, Any] | None = None,
    metadata: ModelMetadata | None = MODEL,
    coalesce: Coalesce = DEFAULT,
) -> Form | None:
    forms = Forms(coalesce, lambda model, version: metadata, METADATA)
    return forms.form(message, timeout, OPTIONS if options is None else options)


def test_a_form_has_the_size_of_the_call() -> None:
    found = form(request(3))
    assert found is not None
    assert (found.rows, found.nbytes, found.max_rows) == (3, 24, 8)
    bounded = form(request(3), coalesce=Coalesce(max_rows=5))
    assert bounded is not None
    assert bounded.max_rows == 5


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: form(request(2)), id="another number of rows"),
        pytest.param(lambda: form(request(inputs={"x": np.ones((1, 2), np.float32)})), id="other values"),
    ],
)
def test_calls_with_the_same_form(other: Callable[[], Form | None]) -> None:
    one, two = form(request()), other()
    assert one is not None
    assert two is not None
    assert one.key == two.key


def test_equal_timeouts_have_equal_forms() -> None:
    """Some of the timeout has passed when the call is sent."""
    one, two = form(request(), 1.0), form(request(), 0.9997)
    assert one is not None
    assert two is not None
    assert one.key == two.key


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: form(request(model="other")), id="another model"),
        pytest.param(lambda: form(request(version="2")), id="another version"),
        pytest.param(lambda: form(request(width=3)), id="rows of another shape"),
        pytest.param(lambda: form(request(dtype=np.int32)), id="another datatype"),
        pytest.param(lambda: form(request(inputs={"z": np.zeros((1, 2), np.float32)})), id="another input"),
        pytest.param(lambda: form(request(outputs=["y"])), id="requested outputs"),
        pytest.param(lambda: form(request(parameters={"priority": 1})), id="a priority"),
        pytest.param(lambda: form(request(), 1.0), id="a timeout"),
        pytest.param(lambda: form(request(), options={**OPTIONS, "wait_for_ready": True}), id="an option"),
    ],
)
def test_calls_with_another_form(other: Callable[[], Form | None]) -> None:
    one, two = form(request()), other()
    assert one is not None
    assert two is not None
    assert one.key != two.key


def test_priorities_and_outputs_are_part_of_the_form() -> None:
    forms = [
        form(request(**options))
        for options in (
            {"parameters": {"priority": 1}},
            {"parameters": {"priority": 2}},
            {"parameters": {"priority": "1"}},
            {"outputs": ["y"]},
            {"outputs": ["z"]},
            {"outputs": ["y", "z"]},
        )
    ]
    assert None not in forms
    assert len({found.key for found in forms if found is not None}) == 6


def with_tensor_parameter(where: str) -> pb.ModelInferRequest:
    message = request(outputs=["y"])
    getattr(message, where)[0].parameters["classification"].int64_param = 1
    return message


@pytest.mark.parametrize(
    "alone",
    [
        pytest.param(lambda: form(request(request_id="r1")), id="an id of its own"),
        pytest.param(lambda: form(request(parameters={"explain": True})), id="a parameter"),
        pytest.param(lambda: form(request(parameters={"priority": 1, "b": 2})), id="two parameters"),
        pytest.param(lambda: form(request(parameters={"sequence_id": 7})), id="a sequence"),
        pytest.param(lambda: form(request(), options={**OPTIONS, "metadata": ()}), id="no metadata"),
        pytest.param(
            lambda: form(request(), options={**OPTIONS, "metadata": (*METADATA, ("traceparent", "t"))}),
            id="metadata of its own",
        ),
        pytest.param(lambda: form(request(), 0.009), id="a short timeout"),
        pytest.param(lambda: form(request(0)), id="no rows"),
        pytest.param(lambda: form(request(8)), id="a full batch"),
        pytest.param(lambda: form(request(2), coalesce=Coalesce(max_rows=2)), id="the most rows"),
        pytest.param(lambda: form(request(1), coalesce=Coalesce(max_rows=1)), id="one row at most"),
        pytest.param(lambda: form(request(3), coalesce=Coalesce(max_bytes=47)), id="many bytes"),
        pytest.param(
            lambda: form(request(inputs={"x": np.zeros((2, 2)), "w": np.zeros(1)})), id="unequal rows"
        ),
        pytest.param(lambda: form(request(inputs={"x": np.zeros(())})), id="no axis"),
        pytest.param(lambda: form(request(inputs={})), id="no inputs"),
        pytest.param(lambda: form(pb.ModelInferRequest(model_name="m")), id="no contents"),
        pytest.param(lambda: form(with_tensor_parameter("inputs")), id="a parameter of an input"),
        pytest.param(lambda: form(with_tensor_parameter("outputs")), id="a parameter of an output"),
        pytest.param(lambda: form(request(), metadata=None), id="an unknown model"),
        pytest.param(lambda: form(request(), metadata=model(rows="0")), id="a model without batches"),
    ],
)
def test_calls_that_are_sent_alone(alone: Callable[[], Form | None]) -> None:
    assert alone() is None


@pytest.mark.parametrize(
    ("metadata", "rows"),
    [
        pytest.param(model(), 8, id="batches"),
        pytest.param(model(X, W), 8, id="several inputs"),
        pytest.param(model(rows=None), 0, id="another server"),
        pytest.param(model(rows="many"), 0, id="no number"),
        pytest.param(model(rows="9" * 10), 0, id="an absurd number"),
        pytest.param(model(X, TensorMetadata("s", "FP32", (2,))), 0, id="an input without rows"),
        pytest.param(model(X, TensorMetadata("o", "FP32", (-1,), optional=True)), 0, id="optional"),
        pytest.param(model(output=TensorMetadata("y", "FP32", (4,))), 0, id="an output without rows"),
        pytest.param(model(output=TensorMetadata("y", "FP32", ())), 0, id="a scalar output"),
    ],
)
def test_models_whose_requests_may_be_joined(metadata: ModelMetadata, rows: int) -> None:
    assert shared_rows(metadata) == rows


def test_the_rows_of_a_replaced_model_are_read_again() -> None:
    known = [model()]
    forms = Forms(Coalesce(), lambda model, version: known[0], METADATA)
    first = forms.form(request(), None, OPTIONS)
    assert first is not None
    assert first.max_rows == 8
    known[0] = model(rows="16")
    second = forms.form(request(), None, OPTIONS)
    assert second is not None
    assert second.max_rows == 16
    known[0] = model(rows="0")
    assert forms.form(request(), None, OPTIONS) is None


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 0},
        {"max_rows": "1"},
        {"max_bytes": 0},
        {"max_wait": -1},
        {"max_wait": float("nan")},
        {"max_wait": True},
    ],
    ids=str,
)
def test_invalid_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(options))):
        Coalesce(**options)


def test_invalid_arguments_of_the_client() -> None:
    with pytest.raises(InvalidInput, match="True, False or a Coalesce"):
        InferenceClient(NOWHERE, coalesce="yes")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="check=False"):
        InferenceClient(NOWHERE, coalesce=True, check=False)
