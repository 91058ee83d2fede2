"""Joining and splitting keep each row's dtype, shape and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from batcher.conftest import Make
from support.batcher.rig import error, ignore, new_request, result, results

from tensorferry.batcher import InvalidRequest, ModelOutputError, Request, Tensor
from tensorferry.batcher.execution.collate import join, split
from tensorferry.batcher.testing import ScriptedRunner

Array = npt.NDArray[Any]


def requests_of(*arrays: Any) -> list[Request]:
    return [new_request(array, ignore) for array in arrays]


def masked() -> Array:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    array.flags.writeable = False
    return array


ARRAYS: dict[str, Callable[[], Array]] = {
    "bool": lambda: np.array([True, False, True]),
    "uint8": lambda: np.arange(6, dtype=np.uint8).reshape(3, 2),
    "big-endian": lambda: np.arange(4, dtype=">f4"),
    "bfloat16": lambda: np.arange(6).reshape(3, 2).astype(ml_dtypes.bfloat16),
    "float8": lambda: np.arange(3).astype(ml_dtypes.float8_e4m3fn),
    "complex": lambda: np.array([1 + 2j, 3 - 4j]),
    "datetime": lambda: np.array(["2024-02-29", "1969-07-20", "NaT"], dtype="datetime64[s]"),
    "structured": lambda: np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "objects": lambda: np.array([{"a": 1}, None, [1, 2]], dtype=object),
    "strings": lambda: np.array([["a", "bcd"], ["", "ü"]]),
    "bytes": lambda: np.array([b"a", b"b\x00c"], dtype=object),
    "read-only": masked,
    "fortran order": lambda: np.asfortranarray(np.arange(12).reshape(3, 4)),
    "transposed": lambda: np.arange(12).reshape(3, 4).T,
    "backwards": lambda: np.arange(6)[::-1],
    "broadcast": lambda: np.broadcast_to(np.float32(7), (3, 2)),
    "no rows": lambda: np.zeros((0, 3), np.float32),
    "empty rows": lambda: np.zeros((3, 0), np.float32),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_join_and_split_return_the_same_array(name: str) -> None:
    """As a single request, in a batch, and split into parts."""
    expected = ARRAYS[name]()
    dtype = np.dtype(object) if expected.dtype.kind == "U" else expected.dtype
    for count in (1, 2, 3):
        requests = requests_of(*[ARRAYS[name]() for _ in range(count)])
        joined = join(requests)
        assert joined.dtype == dtype
        assert joined.shape == (count * len(expected), *expected.shape[1:])
        for part in split(joined, requests):
            assert part.dtype == dtype
            np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize(("start", "copied"), [(8, False), (9, True)])
def test_a_single_request_reads_an_aligned_part_of_its_message_in_place(start: int, copied: bool) -> None:
    expected = np.arange(6, dtype=np.float32).reshape(2, 3)
    message = bytes(start) + expected.tobytes()
    tensor = Tensor(expected.dtype, expected.shape, memoryview(message)[start:])
    joined = join([Request((tensor,), ignore, names=None, rows=2, nbytes=24, key=0)])
    np.testing.assert_array_equal(joined, expected)
    assert joined.flags.aligned
    assert np.shares_memory(joined, np.frombuffer(message, np.uint8)) != copied


def test_a_part_of_a_callers_array_is_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    array.flags.writeable = False
    tensor = Tensor(array.dtype, array.shape, array.data.cast("B"))
    joined = join([Request((tensor,), ignore, names=None, rows=2, nbytes=24, key=0)])
    np.testing.assert_array_equal(joined, array)
    assert not np.shares_memory(joined, array)


@pytest.mark.parametrize("dtype", [np.uint8, "datetime64[s]"])
def test_large_requests_are_joined_in_order(dtype: Any) -> None:
    """More than 4 MiB, which are on huge pages."""
    arrays = [np.full((1 + n, 1 << 20), n, np.uint8).astype(dtype) for n in range(3)]
    np.testing.assert_array_equal(join(requests_of(*arrays)), np.concatenate(arrays))


@pytest.mark.parametrize("rows", [["a\x00", "b"], [[b"a\x00"], [b"\x00"]]])
def test_strings_keep_the_nuls_at_their_ends(rows: Any) -> None:
    assert join(requests_of(rows, rows)).tolist() == [*rows, *rows]


def test_strings_of_different_lengths_share_a_batch(make: Make) -> None:
    runner = ScriptedRunner(lambda x: [len(str(text)) for text in x], gated=True)
    batcher = make(runner)
    first = batcher.submit("")
    runner.await_batches(1)
    futures = [batcher.submit(text) for text in ("a", "four", "eleven char")]
    runner.open()
    assert results([first, *futures]) == [0, 1, 4, 11]
    assert len(runner.batches) == 2


def test_submit_takes_and_returns_a_row_without_the_batch_axis(make: Make) -> None:
    batcher = make(lambda x: {"sum": x.sum(axis=-1), "same": x, "list": x.tolist()})
    answer = result(batcher.submit(np.arange(3)))
    assert answer["sum"] == 3
    assert answer["same"].tolist() == answer["list"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (3.0, "input 'x' is a scalar"),
        ({"a": [1], "b": 3.0}, "input 'b' is a scalar"),
        ({"a": [1, 2], "b": [1]}, r"the same number of rows on axis 0, got {'a': 2, 'b': 1}"),
        ({}, "has no inputs"),
    ],
)
def test_inputs_without_common_rows_are_invalid(make: Make, x: Any, message: str) -> None:
    batcher = make(lambda x: x)
    with pytest.raises(InvalidRequest, match=message):
        batcher.submit_rows(x)
    assert batcher.statistics().sizes.queued == 0


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (np.zeros(1), r"result has shape \[1\], expected 3 rows"),
        (np.zeros(()), r"result has shape \[\], expected 3 rows"),
        ([1, 2], "result has 2 entries, expected 3"),
        ({"a": np.zeros(3), "b": np.zeros((4, 3))}, r"output 'b' has shape \[4, 3\], expected 3 rows"),
        ({"a": [1, 2, 3, 4]}, "output 'a' has 4 entries, expected 3"),
        (None, "result is of type NoneType; return an array"),
        (7.0, "result is of type float"),
    ],
)
def test_an_output_with_the_wrong_rows_is_a_model_error(make: Make, output: Any, message: str) -> None:
    caught = error(make(lambda x: output).submit_rows(np.zeros(3)))
    assert isinstance(caught, ModelOutputError)
    with pytest.raises(ModelOutputError, match=message):
        raise caught


@pytest.mark.parametrize("size", [0, 1, 8])
@pytest.mark.parametrize(
    "model_fn",
    [
        pytest.param(lambda x: x, id="its input"),
        pytest.param(lambda x: (x * 2)[:], id="a view"),
        pytest.param(lambda x: {"y": x[:]}, id="a dict"),
        pytest.param(lambda x: list(x[:, None]), id="a list of views"),
    ],
)
def test_a_result_is_a_copy(make: Make, model_fn: Callable[[Any], Any], size: int) -> None:
    """Keeping a row does not keep the batch alive, and writing to it changes no other row."""
    sent = np.arange(4.0)
    answer = result(make(model_fn, size).submit_rows(sent))
    answer = answer["y"] if isinstance(answer, dict) else answer
    for array in answer if isinstance(answer, list) else [answer]:
        assert array.base is None
        array[...] = -1
    assert sent.tolist() == [0, 1, 2, 3]


def test_a_result_that_cannot_be_copied_is_an_error(make: Make) -> None:
    """For example, there may be no memory for the copy."""

    class Stubborn(np.ndarray[Any, Any]):
        def copy(self, *_: Any) -> Any:
            raise MemoryError

    batcher = make(lambda x: x.view(Stubborn))
    assert isinstance(error(batcher.submit_rows([1.0])), MemoryError)


@pytest.mark.parametrize(
    "values", [np.ones((1, 2)), np.array(["a"]), np.ones((1, 1 << 20))], ids=["numbers", "strings", "large"]
)
@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("form", [lambda array: array, lambda array: {"x": array}], ids=["bare", "named"])
def test_inputs_are_read_only_however_many_requests_are_joined(
    values: Array, requests: int, form: Callable[[Array], Any]
) -> None:
    joined = join(requests_of(*[form(values)] * requests))
    (array,) = joined.values() if isinstance(joined, dict) else (joined,)
    assert len(array) == requests
    with pytest.raises(ValueError, match="read-only"):
        array[0] = array[0]
