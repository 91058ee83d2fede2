"""Unusable arguments raise an error of this package that says what to change."""

from __future__ import annotations

import datetime
import decimal
import fractions
import functools
import inspect
import math
import sys
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from client import calls
from client.scripted import ScriptedServer, ScriptedServicer, model
from client.test_settings import METHODS

from tensorferry import client as tf
from tensorferry.client import (
    InferenceClient,
    InvalidInput,
    ModelMetadata,
    Retry,
    StreamRequest,
    TensorMetadata,
    Tls,
)
from tensorferry.client.messages.checks import check_inputs

ROW = {"x": [1]}


class NoArray:
    """An object that numpy cannot convert."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no array here")


WRONG_TIMEOUTS: list[Any] = [
    -1, 0, 0.0, -0.0, -1e-9, math.nan, -math.inf, "1", "", b"1", True, False, [1], {}, 1j, np.bool_(True),
    np.array(1.0), np.float32("nan"), decimal.Decimal(1), datetime.timedelta(seconds=1), object(), -(10**400),
]  # fmt: skip
RIGHT_TIMEOUTS: list[Any] = [
    None, math.inf, 30, 30.5, np.float32(30), np.int64(30), fractions.Fraction(61, 2), 1e300, 10**400, np.float64("inf"),
]  # fmt: skip


def test_every_method_that_takes_a_timeout_is_here() -> None:
    methods = inspect.getmembers(InferenceClient, inspect.isfunction)
    found = {
        name for name, one in methods if name[0] != "_" and "timeout" in inspect.signature(one).parameters
    }
    # The timeouts of these two are for their `with` statements: memory/test_shared_memory.py, and below.
    assert found == {name for name, _ in METHODS} | {"shared_memory", "sequence"}


def test_timeouts(client: InferenceClient, servicer: ScriptedServicer) -> None:
    message = r"^timeout expects a positive number of seconds, got"
    for timeout in WRONG_TIMEOUTS:
        with pytest.raises(InvalidInput, match=message) as caught:
            client.is_live(timeout=timeout)
        assert "of type" in caught.value.received
    for method, arguments in METHODS:
        with pytest.raises(InvalidInput, match=message):
            calls.call(client, method, *arguments, timeout=math.nan)
    assert servicer.calls == []
    client.metadata("row")
    with pytest.raises(InvalidInput, match=message):
        client.metadata("row", timeout=-1)
    for timeout in RIGHT_TIMEOUTS:
        client.is_live(timeout=timeout)


def test_a_stream_is_checked_before_it_begins(client: InferenceClient) -> None:
    with pytest.raises(InvalidInput, match="timeout"):
        client.stream("row", [], timeout=0)
    with pytest.raises(InvalidInput, match="timeout"):
        client.sequence("row", timeout=0)
    with pytest.raises(InvalidInput, match=r"write \[inputs\]"):
        client.stream("row", ROW)  # type: ignore[arg-type]


TARGETS: list[tuple[Any, str]] = [
    ("", "such as '127.0.0.1:8001'"), (8001, "such as '127.0.0.1:8001'"), ("127.0.0.1", "write '127.0.0.1:8001'"),
    ("localhost", "write 'localhost:8001'"), ("127.0.0.1:", "write '127.0.0.1:8001'"), (":8001", "write '127.0.0.1:8001'"),
    ("127.0.0.1:x", "write '127.0.0.1:8001'"), ("127.0.0.1:0", "write '127.0.0.1:8001'"),
    ("127.0.0.1:65536", "write '127.0.0.1:8001'"), ("127.0.0.1:80010000000", "write '127.0.0.1:8001'"),
    ("http://127.0.0.1:8001", "write '127.0.0.1:8001'"), ("http://127.0.0.1", "write '127.0.0.1:8001'"),
    ("http://user@server:9000/v2/models?x#y", "write 'server:9000'"),
    ("https://server:9000", "write 'server:9000', with tls=True"), ("grpc://server:9000", "write 'server:9000'"),
    ("server:9000/v2", "write 'server:9000'"), ("server:9000,other:9000", "write 'server:9000'"),
    ("300.1.1.1:80", "is no IP address"), ("1.2.3:80", "is no IP address"), ("::1", r"write '[::1]:8001'"),
    ("[::1]", r"write '[::1]:8001'"), ("[x]:8001", "write"), ("dns:///server", "write 'dns:server:8001'"),
    ("ipv4:127.0.0.1", "write 'ipv4:127.0.0.1:8001'"), ("ipv4:127.0.0.1:1,127.0.0.2", "write 'ipv4:127.0.0.2:8001'"),
    ("ipv4:server:1", "is no IP address"), ("unix:", "name what is behind 'unix:'"), (" server:8001", "write 'server:8001'"),
    ("server:8001\n", "write 'server:8001'"), ("ser\0ver:8001", "such as '127.0.0.1:8001'"), ("ser ver:8001", "write"),
    ([], "write ['127.0.0.1:8001']"), (["127.0.0.1:1", "127.0.0.2"], "write '127.0.0.2:8001'"),
    (["127.0.0.1:1", ["127.0.0.1:2"]], "such as"), (["127.0.0.1"], "write '127.0.0.1:8001'"),
    (b"127.0.0.1:1", "write '127.0.0.1:1'"), ({}, "such as"), ("x" * 100_000, "write an address"),
    ("x" * 100_001, "such as '127.0.0.1:8001'"),
]  # fmt: skip
GOOD_TARGETS: list[Any] = [
    "127.0.0.1:8001", "localhost:1", "server.example:65535", "a_b-c:1", "[::1]:8001", "dns:server:8001",
    "dns:///server:8001", "dns://8.8.8.8/server:8001", "ipv4:127.0.0.1:1,127.0.0.2:2", "ipv6:[::1]:8001",
    "ipv6:%5B::1%5D:8001", "unix:/run/x", "unix:///run/x", "unix-abstract:x", "xds:///service", "bücher.example:8001",
    ["127.0.0.1:1"], ("127.0.0.1:1", "[::1]:2"), ["server:1", "unix:/run/x"], None,
]  # fmt: skip


def test_targets() -> None:
    for target, change in TARGETS:
        with pytest.raises(InvalidInput) as caught:
            InferenceClient(target)
        assert caught.value.subject == "target"
        assert change in caught.value.change, target
        assert len(str(caught.value)) < 600
    for target in GOOD_TARGETS:
        InferenceClient(target).close()


def of_str() -> list[Any]:
    return [None, 1, 1.5, True, b"row", ["row"], {}, object(), "\ud800"]


# Invalid values of each argument of a request.
WRONG: dict[str, list[Any]] = {
    "model": [*of_str(), ""],
    "version": [None, 1, b"1", [], "\ud800"],
    "inputs": [None, 1, "x", [1], np.zeros(3), {}, {1: [1]}, {b"x": [1]}, {None: [1]}, {"\ud800": [1]}, {"y": [1]}, {"x": None},
               {"x": NoArray()}, {"x": object()}, {"x": {}}, {"x": "1"}, {"x": b"1"}, {"x": [[1], [1, 2]]},
               {"x": [2**70]}, {"x": [1.5]}, {"x": [math.nan]}, {"x": 1j}, {"x": [1, 2]}, {"x": np.zeros(1)},
               {"x": np.array(["a"])}, {"x": np.array([None])}, {"x": np.array([1], "datetime64[s]")}, {"x": set()},
               {"x": [datetime.date(2000, 1, 1)]}, {"x": np.zeros(1, [("a", "i4")])}],
    "outputs": ["x", b"x", 1, {"x": 1}, {"x"}, [1], [None], ["y"], ["\ud800"], True],
    "request_id": [1, b"1", [], True, "\ud800"],
    "parameters": [1, "x", [("a", 1)], {1: 1}, {b"a": 1}, {"a": None}, {"a": b"1"}, {"a": [1]}, {"a": 2**64}, {"a": -(2**70)},
                   {"a": object()}, {"a": "\ud800"}, {"\ud800": 1}, {"a": 1j}],
    "max_in_flight": [0, -1, 1.5, "1", None, True, math.inf, math.nan, 2**40, [1]],
    "requests": [None, 1, "ab", b"ab", ROW, [1], [None], ["x"], [[ROW]], [("x", 1)], [StreamRequest({"y": [1]})],
                 [StreamRequest(None)], [StreamRequest(ROW, 7)], [StreamRequest(ROW, outputs="x")],  # type: ignore[arg-type]
                 [StreamRequest(ROW, parameters=[1])]],  # type: ignore[arg-type]
    "on_error": [None, "stop", 1, [], b"raise"],
    "metadata": [None, 1, "ab", [1], [("a b", "c")], [("a", 1)], [("grpc-timeout", "1S")]],
    "compression": [1, "zip"],
}  # fmt: skip
SIGNATURES = {"infer": ("model", "inputs"), "submit": ("model", "inputs"), "stream": ("model", "requests")}
RIGHT = {"model": "row", "inputs": ROW, "requests": [ROW]}


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (method, name)
        for method in SIGNATURES
        for name in inspect.signature(getattr(InferenceClient, method)).parameters
        if name in WRONG
    ],
)
def test_requests(client: InferenceClient, servicer: ScriptedServicer, method: str, name: str) -> None:
    for value in WRONG[name]:
        arguments = {key: RIGHT[key] for key in SIGNATURES[method]} | {name: value}
        with pytest.raises(InvalidInput) as caught:
            calls.call(client, method, **arguments)
        check(caught.value)
    assert "ModelInfer" not in servicer.calls


def check(error: InvalidInput) -> None:
    """The message says what was received, what was expected and what to change, in bounded length."""
    assert isinstance(error, tf.InferenceError)
    assert all((error.subject, error.expected, error.received, error.change))
    assert str(error).startswith(
        f"{error.subject} expects {error.expected}, got {error.received}: {error.change}"
    )
    assert len(str(error)) < 1000


def test_models(client: InferenceClient, servicer: ScriptedServicer) -> None:
    for method in ("metadata", "is_model_ready"):
        for name in ("model", "version"):
            for value in WRONG[name]:
                with pytest.raises(InvalidInput):
                    calls.call(client, method, **({"model": "row"} | {name: value}))
    assert servicer.calls == []


def test_unchecked_requests(server: ScriptedServer) -> None:
    """Without metadata only values that cannot be encoded are refused, before they are sent."""
    with InferenceClient(server.target, check=False) as client:
        for inputs in [None, 1, [1], {1: [1]}, {"\ud800": 1}, {"x": None}, {"x": NoArray()}, {"x": object()}, {"x": 2**70},
                       {"x": [[1], [1, 2]]}, {"x": 1j}, {"x": np.array([1], "datetime64[s]")}, {"x": ["\ud800"]}]:  # fmt: skip
            with pytest.raises(InvalidInput):
                client.infer("row", inputs)  # type: ignore[arg-type]
    assert server.servicer.calls == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tls", [None, 1, "ca.pem", {}, Tls("/nowhere/ca.pem"), Tls(1), Tls("/tmp"), Tls("a\0b")]),  # type: ignore[arg-type]
        ("credentials", [1, "x", True, object()]),
        ("metadata", [None, 1, "ab", {"a": "b"}, [1], [("a",)], [("a", 1)], [(1, "a")], [("a b", "c")], [("", "c")],
                      [("a", "b\nc")], [("a", "é")], [("a-bin", "b")], [("é", "b")], [":path", "x"], [(":path", "x")]]),
        ("max_message_bytes", [0, -1, None, "1", 1.5, 2**31, True, math.nan]),
        ("options", [None, 1, "ab", {"a": 1}, [1], [("a",)], [("a", None)], [("a", 2**40)], [("a", 1.5)], [(1, 1)]]),
        ("retry", [1, True, "x", {}, Retry]),
        ("connections", [0, 65, -1, "4", 1.5, True]),
        ("compression", [1, None, "brotli"]),
        ("token", [1, b"x", "", "a b", "a\n", "é", [], True]),
    ],
)  # fmt: skip
def test_constructor(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidInput) as caught:
            InferenceClient("127.0.0.1:1", **{name: value})
        check(caught.value)


def test_conflicting_options_are_refused() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        InferenceClient("127.0.0.1:1", tls=True, credentials=grpc.ssl_channel_credentials())
    with pytest.raises(ValueError, match="cert_file and key_file together"):
        Tls(cert_file="cert.pem")
    with pytest.raises(ValueError, match="metadata 'x' expects str, got bytes"):
        InferenceClient("127.0.0.1:1", metadata=[("x", b"bytes")])


def test_retry() -> None:
    numbers: list[Any] = [-1, math.nan, "1", None, True, []]
    wrong: dict[str, list[Any]]
    wrong = {"attempts": [0, -1, 1.5, "1", None, True, 2**40], "budget": numbers, "ratio": numbers}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(InvalidInput) as caught:
                Retry(**{name: value})
            check(caught.value)


def test_bf16_lists_without_ml_dtypes(
    servicer: ScriptedServicer, client: InferenceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    servicer.models["half"] = model("half", {"x": "BF16 -1"}, {"x": "BF16 -1"})
    with pytest.raises(InvalidInput, match="pip install ml_dtypes"):
        client.infer("half", {"x": [1.5]})


def test_an_unknown_datatype_in_the_metadata(servicer: ScriptedServicer, client: InferenceClient) -> None:
    servicer.models["odd"] = model("odd", {"x": "FP8 -1"}, {"x": "FP8 -1"})
    for value in ([1], np.zeros(1)):
        with pytest.raises(InvalidInput, match="FP8"):
            client.infer("odd", {"x": value})


def test_a_closed_client(server: ScriptedServer) -> None:
    client = InferenceClient(server.target)
    client.close()
    for method, arguments in METHODS:
        begin = functools.partial(getattr(client, method), *arguments)
        with pytest.raises(tf.ClientClosed, match="create another one") as caught:
            next(begin()) if method == "stream" else begin()
        assert isinstance(caught.value, tf.InferenceError)
        assert isinstance(caught.value, RuntimeError)


def test_the_repr_of_a_result_shows_its_outputs_and_no_values() -> None:
    outputs = {
        "label": np.zeros((2,), np.int64),
        "words": np.array([[b"w" * 10_000]], object),
        "image": np.zeros((512, 512), np.float32),
    }
    result = tf.InferenceResult("digits", "1", "r1", {"text": "t" * 10**6, "batch_rows": 3}, outputs)
    shown = repr(result)
    assert "outputs={'label': INT64 [2], 'words': BYTES [1, 1], 'image': FP32 [512, 512]}" in shown
    assert shown.startswith("InferenceResult(model_name='digits', model_version='1', id='r1', ")
    assert "'batch_rows': 3" in shown
    assert len(shown) < 500
    many = tf.InferenceResult("m", "", "", {}, {f"{'n' * 10**5}{i}": outputs["label"] for i in range(100)})
    assert "and 80 more" in repr(many)
    assert len(repr(many)) < 10_000


# Comparison with the metadata of the model


def metadata(datatype: str, *shape: int) -> ModelMetadata:
    tensors = (TensorMetadata("x", datatype, shape),)
    return ModelMetadata("m", ("1",), "", tensors, tensors)


@pytest.mark.parametrize(
    ("datatype", "shape", "value", "text"),
    [
        (
            "UINT8",
            (-1, 8, 8),
            np.ones((8, 8), np.float32),
            "input 'x' of model 'm' expects UINT8 [-1, 8, 8], got FP32 [8, 8]:"
            " use array.astype(np.uint8)[np.newaxis]",
        ),
        ("BOOL", (-1,), np.ones(3), "use array.astype(np.bool_)"),
        ("BF16", (-1,), np.ones(3), "use array.astype(ml_dtypes.bfloat16)"),
        ("FP32", (-1,), np.ones(3, np.complex64), "got numpy complex64 [3]: use array.astype(np.float32)"),
        ("FP32", (-1,), np.array([1, "a"], object), "got BYTES [2]: use array.astype(np.float32)"),
        ("FP32", (-1, 3), np.ones(3, np.float32), "got FP32 [3]: use array[np.newaxis]"),
        ("FP32", (-1, 3), np.ones((2, 4), np.float32), "got FP32 [2, 4]: reshape or pad it so that axis 1 is 3 long, not 4"),
        ("FP32", (-1, 3), np.ones((1, 1, 3), np.float32), "give it 2 axes, not 3"),
        ("INT64", (), np.ones(1, np.int64), "expects INT64 [], got INT64 [1]: give it 0 axes, not 1"),
        ("INT64", (-1,), [[1], [1, 2]], "a list that is no array"),
        ("INT64", (-1,), ["1"], "expects INT64 [-1], got str [1]: use numbers that INT64 can hold"),
        ("INT64", (-1,), [1.5], "values that INT64 cannot hold exactly (numpy reads them as float64)"),
        ("UINT8", (-1,), [256], "np.array(values, dtype=np.uint8)"),
        ("UINT64", (-1,), [2**63 + 1, 0.5], "cannot hold exactly"),
        ("FP32", (-1,), [2**24 + 1], "cannot hold exactly"),
        ("FP16", (-1,), [1e6], "cannot hold exactly"),
        ("FP32", (-1,), [1j], "got complex numbers [1]"),
        ("FP32", (-1,), None, "a NoneType that is no array"),
        ("FP32", (-1,), np.ma.masked_equal(np.ones(2, np.float32), 1), "an array with masked values: fill them"),
    ],
)  # fmt: skip
def test_a_misfit_says_expected_received_and_change(
    datatype: str, shape: tuple[int, ...], value: object, text: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_inputs({"x": value}, metadata(datatype, *shape))
    assert text in str(caught.value)
    assert caught.value.subject == "input 'x' of model 'm'"


@pytest.mark.parametrize(
    ("datatype", "value", "expected"),
    [
        ("FP32", [0.1, float("inf")], np.array([0.1, np.inf], np.float32)),
        ("FP16", (1, 2), np.array([1, 2], np.float16)),
        ("BF16", [0.1, 2.5], np.array([0.1, 2.5], ml_dtypes.bfloat16)),
        ("BF16", [ml_dtypes.bfloat16(2.5)], np.array([2.5], ml_dtypes.bfloat16)),
        ("INT8", [ml_dtypes.bfloat16(2)], np.array([2], np.int8)),
        ("FP64", [2**60, 1], np.array([2.0**60, 1])),
        ("INT8", [-128, 127], np.array([-128, 127], np.int8)),
        ("INT64", [1.0, 2.0], np.array([1, 2], np.int64)),
        ("INT64", [2**53 + 1, 1.0], np.array([2**53 + 1, 1], np.int64)),
        ("UINT64", [np.uint64(2**63 + 1), np.int64(1)], np.array([2**63 + 1, 1], np.uint64)),
        ("UINT64", [2**64 - 1, 2**63], np.array([2**64 - 1, 2**63], np.uint64)),
        ("BOOL", [True, 0], np.array([True, False])),
        ("INT32", [True, False], np.array([1, 0], np.int32)),
        ("INT32", [], np.array([], np.int32)),
        ("BYTES", ["a", b"b\0"], np.array(["a", b"b\0"], object)),
    ],
)
def test_python_values_become_the_models_datatype(
    datatype: str, value: object, expected: np.typing.NDArray[np.generic]
) -> None:
    array = check_inputs({"x": value}, metadata(datatype, -1))["x"]
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


def test_python_scalars_become_scalars() -> None:
    assert check_inputs({"x": 3}, metadata("INT32"))["x"].shape == ()
    assert check_inputs({"x": "text"}, metadata("BYTES"))["x"].tolist() == "text"
    with pytest.raises(InvalidInput, match="got FP64"):
        check_inputs({"x": np.float64(3)}, metadata("FP32"))


def test_arrays_are_not_copied() -> None:
    array = np.ones(3, np.float32)
    assert check_inputs({"x": array}, metadata("FP32", -1))["x"] is array


def test_inputs_go_in_the_order_of_the_model() -> None:
    tensors = tuple(TensorMetadata(name, "INT64", (1,)) for name in "ba")
    assert list(check_inputs({"a": [1], "b": [2]}, ModelMetadata("m", (), "", tensors, ()))) == ["b", "a"]


def test_names_are_checked(servicer: ScriptedServicer, client: InferenceClient) -> None:
    with pytest.raises(InvalidInput) as caught:
        client.infer("text", {"words": ["a"], "w": [[1, 2]]}, request_id="r1")
    assert str(caught.value) == (
        "model 'text' expects the inputs 'words', 'weights', got 'words', 'w': add 'weights' and remove 'w' (request 'r1')"
    )
    assert caught.value.request_id == "r1"
    with pytest.raises(InvalidInput, match="outputs out of 'image', got 'label': remove 'label'"):
        client.infer("digits", {"image": np.ones((1, 8, 8), np.uint8)}, outputs=["label"])
    assert set(servicer.calls) == {"ModelMetadata"}


@pytest.mark.parametrize("checked", [True, False])
def test_elements_of_bytes_are_checked(server: ScriptedServer, checked: bool) -> None:
    words = np.array(["a", 1], object)
    with (
        InferenceClient(server.target, check=checked) as client,
        pytest.raises(InvalidInput, match="must be bytes or str, got int"),
    ):
        client.infer("text", {"words": words, "weights": [[1, 2]]})
