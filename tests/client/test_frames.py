"""Data frames and dicts of lists as inputs, and results as tables."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from client.scripted import ScriptedServer, model

from tensorferry.client import InferenceClient, InferenceResult, InvalidInput, StreamRequest

pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")

COLUMNS = {"age": [30, 41, 52], "height": [1.5, 1.75, 2.0], "member": [True, False, True]}
FEATURES = np.array([[30, 1.5, 1], [41, 1.75, 0], [52, 2.0, 1]], np.float32)


@pytest.fixture(autouse=True)
def _models(server: ScriptedServer) -> None:
    """`features` has one input of three features, `columns` an input for each column."""
    each = {"age": "INT64 -1", "height": "FP32 -1 1", "name": "BYTES -1 -1"}
    server.servicer.models.update(
        features=model("features", {"x": "FP32 -1 3"}, {"x": "FP32 -1 3"}),
        any=model("any", {"x": "FP64 -1 -1"}, {"x": "FP64 -1 -1"}),
        columns=model("columns", each, each),
        flat=model("flat", {"x": "INT64 -1"}, {"x": "INT64 -1"}),
    )


LIBRARIES = [pandas.DataFrame, pyarrow.table, pyarrow.RecordBatch.from_pydict]


@pytest.mark.parametrize("form", [*LIBRARIES, dict])
def test_columns_are_features_in_order(client: InferenceClient, form: Any) -> None:
    frame = form(COLUMNS)
    found = [client.infer("features", frame), client.submit("features", frame).result(30)]
    for result in (*found, *client.stream("features", [frame, StreamRequest(frame)])):
        np.testing.assert_array_equal(result["x"], FEATURES)
        assert result["x"].dtype == np.float32


@pytest.mark.parametrize("form", LIBRARIES)
def test_columns_are_inputs_by_name(client: InferenceClient, form: Any) -> None:
    columns = {"name": ["a", "ö", ""], "height": [1.5, 1.75, 2.0], "age": [1, 2, 3]}
    result = client.infer("columns", form(columns))
    assert result["age"].tolist() == [1, 2, 3]
    assert result["height"].tolist() == [[1.5], [1.75], [2.0]]
    assert result["name"].tolist() == [[b"a"], ["ö".encode()], [b""]]


@pytest.mark.parametrize(
    ("datatype", "columns", "rows"),
    [
        ("BYTES", {"a": ["x\0", "y"], "b": [b"", b"z"]}, [[b"x\0", b""], [b"y", b"z"]]),
        ("UINT64", {"a": [2**63 + 1, 1], "b": [2.0, 3]}, [[2**63 + 1, 2], [1, 3]]),
        ("INT64", {"a": [2**53 + 1, 1.0], "b": [-1, 0]}, [[2**53 + 1, -1], [1, 0]]),
    ],
)
def test_lists_of_columns_keep_their_values(
    server: ScriptedServer, client: InferenceClient, datatype: str, columns: dict[str, Any], rows: object
) -> None:
    """numpy drops zero bytes at the end of strings, and rounds large integers beside other numbers."""
    tensor = {"x": f"{datatype} -1 2"}
    server.servicer.models["two"] = model("two", tensor, tensor)
    assert client.infer("two", columns)["x"].tolist() == rows


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": ["x", float("nan")], "b": ["y", "z"]}, r"column 'a' .*str or bytes, got nan in row 1"),
        ({"a": ["x", "y"], "b": ["z", 1]}, r"column 'b' .*str or bytes, got 1 in row 1"),
        ({"a": ["x", "y"], "b": ["z"]}, "columns of the same length, got columns of 1 and of 2 rows"),
        (pandas.DataFrame(), "columns of the same length, got no columns"),
    ],
)
def test_columns_that_are_no_rows_of_strings(
    server: ScriptedServer, client: InferenceClient, columns: Any, message: str
) -> None:
    server.servicer.models["words"] = model("words", {"x": "BYTES -1 -1"}, {"x": "BYTES -1 -1"})
    with pytest.raises(InvalidInput, match=message):
        client.infer("words", columns)


def test_nested_lists_are_no_columns(client: InferenceClient) -> None:
    with pytest.raises(InvalidInput, match=r"column 'a' .*expects numbers for FP64"):
        client.infer("any", {"a": [[1], [2, 3]], "b": [1, 2]})


def test_a_frame_of_one_column(client: InferenceClient) -> None:
    assert client.infer("flat", pandas.DataFrame({"x": [1, 2]}))["x"].tolist() == [1, 2]
    assert client.infer("any", pandas.DataFrame({0: [1, 2]}))["x"].tolist() == [[1.0], [2.0]]


def test_older_versions_of_pandas_give_objects(
    client: InferenceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_numpy = pandas.Series.to_numpy
    monkeypatch.setattr(
        pandas.Series, "to_numpy", lambda self, dtype=object, **options: to_numpy(self, dtype, **options)
    )
    frame = pandas.DataFrame({"x": pandas.Series([2**53 + 1], dtype="Int64")})
    assert client.infer("flat", frame)["x"].tolist() == [2**53 + 1]


def test_missing_numbers_are_nan(client: InferenceClient) -> None:
    for column in (
        pandas.Series([1.0, None, 3.0]),
        pandas.Series([1, None, 3], dtype="Int64"),
        pandas.Series([1.0, None, 3.0], dtype="Float32"),
    ):
        result = client.infer("any", pandas.DataFrame({"a": column, "b": [1, 2, 3]}))
        np.testing.assert_array_equal(result["x"], [[1, 1], [np.nan, 2], [3, 3]])
    result = client.infer("any", pyarrow.table({"a": [1, None], "b": [1.5, 2.5]}))
    np.testing.assert_array_equal(result["x"], [[1, 1.5], [np.nan, 2.5]])


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("features", {"a": [1], "b": [2]}, r"input 'x' of model 'features' expects 3 columns, one for each feature, in order, got 2: 'a', 'b'"),
    ("features", {"a": [1], "b": ["x"], "c": [1]}, r"column 'b' for input 'x' of model 'features' expects numbers for FP32, got dtype"),
    ("features", {"a": [1], "b": [1e300], "c": [1]}, r"column 'b' for input 'x' .* values that FP32 cannot hold exactly"),
    ("features", {"a": [1], "b": [2**24 + 1], "c": [1]}, r"column 'b' .* cannot hold exactly"),
    ("columns", {"age": [1], "height": [1.0], "nam": ["a"]}, r"model 'columns' expects the columns 'age', 'height', 'name', got 'age', 'height', 'nam': add 'name' and remove 'nam'"),
    ("columns", {"age": [1.5], "height": [1.0], "name": ["a"]}, r"column 'age' for input 'age' of model 'columns'.*INT64 cannot hold exactly"),
    ("columns", {"age": [1], "height": [1.0], "name": [3]}, r"column 'name' .*expects BYTES: str or bytes, got 3 in row 0"),
    ("columns", {"age": [1, None], "height": [1.0, 2.0], "name": ["a", "b"]}, r"column 'age' .*INT64 cannot hold exactly"),
    ("digits", {"image": [1]}, r"input 'image' of model 'digits' expects UINT8 \[-1, 8, 8\], got the column 'image'"),
    ("flat", {"y": [1]}, r"model 'flat' expects the columns 'x', got 'y'"),
]  # fmt: skip


@pytest.mark.parametrize("form", LIBRARIES)
def test_errors_name_the_column(client: InferenceClient, form: Any) -> None:
    for name, frame, message in WRONG:
        with pytest.raises(InvalidInput, match=message):
            client.infer(name, form(frame))


def test_missing_strings_and_columns_of_one_name_are_refused(client: InferenceClient) -> None:
    for missing in (None, float("nan"), pandas.NA):
        frame = pandas.DataFrame({"name": ["a", missing], "height": [1.0, 2.0], "age": [1, 2]})
        with pytest.raises(
            InvalidInput, match=r"column 'name' .*expects BYTES: str or bytes, got .* in row 1"
        ):
            client.infer("columns", frame)
    frame = pandas.DataFrame([[1, 2, 3]], columns=["a", "b", "a"])
    with pytest.raises(
        InvalidInput, match="the data frame expects columns with different names, got 'a' twice"
    ):
        client.infer("features", frame)


def test_a_wrong_name_of_an_input_is_no_column(client: InferenceClient) -> None:
    """A dict of one unknown name, or with arrays, stays a dict of inputs."""
    for inputs in (
        {"y": [1.0, 2.0, 3.0]},
        {"y": np.zeros(3), "z": np.zeros(3)},
        {"x": [[1.0] * 3], "y": [1]},
    ):
        with pytest.raises(InvalidInput, match="expects the inputs 'x'"):
            client.infer("features", inputs)


@pytest.mark.parametrize("library", ["pandas", "pyarrow", "opentelemetry.context"])
def test_requests_while_another_thread_imports_a_library(
    client: InferenceClient, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    """As the first `to_pandas()` of a stream does: the module is known, and has no names yet."""
    monkeypatch.setitem(sys.modules, library, ModuleType(library))
    assert [result["x"].tolist() for result in client.stream("flat", [StreamRequest({"x": [1, 2]})])] == [
        [1, 2]
    ]


def test_a_frame_needs_metadata(server: ScriptedServer) -> None:
    with (
        InferenceClient(server.target, check=False) as client,
        pytest.raises(InvalidInput, match="because check=False, got a data frame"),
    ):
        client.infer("features", pandas.DataFrame(COLUMNS))


def result_of(**outputs: Any) -> InferenceResult:
    return InferenceResult("m", "1", "", {}, outputs)


def test_results_as_tables() -> None:
    result = result_of(
        label=np.array([7, 8]),
        scores=np.array([[0.5, 0.25], [1.0, 0.0]], np.float32),
        one=np.array([[1], [2]]),
        image=np.arange(8).reshape(2, 2, 2),
        word=np.array(["ö".encode(), b""], object),
        half=np.array([1.5, 2.5], ml_dtypes.bfloat16),
    )
    expected = {
        "label": [7, 8], "scores_0": [0.5, 1.0], "scores_1": [0.25, 0.0], "one": [1, 2],
        "image": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], "word": ["ö", ""], "half": [1.5, 2.5],
    }  # fmt: skip
    frame = result.to_pandas()
    assert {name: frame[name].tolist() for name in frame} == expected
    assert frame["scores_0"].dtype == np.float32
    assert result.to_arrow().to_pydict() == expected
    lists = result.to_lists()
    assert lists["scores"] == [[0.5, 0.25], [1.0, 0.0]]
    assert lists["word"] == ["ö", ""]
    assert result.to_lists(text=False)["word"] == ["ö".encode(), b""]
    assert result.to_pandas(text=False)["word"].tolist() == ["ö".encode(), b""]
    assert result.to_arrow(text=False)["word"].to_pylist() == ["ö".encode(), b""]


def test_what_is_no_table_is_refused() -> None:
    outputs: dict[str, Any]
    for outputs, message in (
        ({"a": np.zeros(2), "b": np.zeros(3)}, r"the same number of rows, got 'a' \[2\], 'b' \[3\]"),
        ({"a": np.zeros(())}, r"the same number of rows, got 'a' \[\]"),
        ({"a": np.zeros((1, 2)), "a_1": np.zeros(1)}, "columns with different names, got 'a_1' twice"),
        ({"a": np.array([b"\xff"], object)}, r"output 'a' as text expects UTF-8, got b'\\xff' at \[0\]: use text=False"),
    ):  # fmt: skip
        for method in ("to_pandas", "to_arrow"):
            with pytest.raises(InvalidInput, match=message):
                getattr(result_of(**outputs), method)()


@pytest.mark.parametrize("library", ["pandas", "pyarrow"])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    method = {"pandas": "to_pandas", "pyarrow": "to_arrow"}[library]
    with pytest.raises(
        ImportError, match=f"{method}\\(\\) needs {library}, which is not installed: pip install"
    ):
        getattr(result_of(a=np.zeros(1)), method)()
