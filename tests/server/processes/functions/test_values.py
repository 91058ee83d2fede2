"""Values in the form that is sent, and the hash of inputs, without a process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from server.processes.functions.test_runs import assert_equal
from support.server.rig import reproducible

from tensorferry.server.processes.functions.arrays import ArrayMemory, create_memory
from tensorferry.server.processes.functions.values import digest_of_inputs, dumps, encode, loads


def sent(value: Any, writer: ArrayMemory | None, reader: ArrayMemory | None) -> Any:
    return loads(dumps(encode(value, writer, "the value")), reader)


class Pair:
    """The memory as both processes map it."""

    def __init__(self) -> None:
        file = create_memory("test")
        self.writer, self.reader = ArrayMemory(file), ArrayMemory(os.dup(file))

    def close(self) -> None:
        self.writer.close()
        self.reader.close()

    def sent(self, value: Any) -> Any:
        return sent(value, self.writer, self.reader)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


DTYPES = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(),
    arrays.floating_dtypes(),
    arrays.byte_string_dtypes(),
    arrays.unicode_string_dtypes(),
)
ARRAYS = arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, min_side=0))
STRINGS = arrays.arrays(
    object, arrays.array_shapes(min_dims=0, min_side=0), elements=st.one_of(st.text(), st.binary())
)
SCALARS = st.one_of(
    st.text(),
    st.binary(),
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.sampled_from([np.float32(1.5), np.bool_(True)]),
)
VALUES = st.recursive(
    st.one_of(ARRAYS, STRINGS, SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=6,
)


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, np.ndarray):
        assert_equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for name, value in expected.items():
            assert_same(got[name], value)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


@reproducible
@given(VALUES)
def test_any_value_arrives_unchanged(pair: Pair, value: Any) -> None:
    pair.writer.begin(1)
    assert_same(pair.sent(value), value)
    assert_same(sent(value, None, None), value)


@pytest.mark.skipif(np.__version__ < "2", reason="numpy 1 has no such dtype")
def test_texts_of_numpys_string_dtype_arrive_as_objects(pair: Pair) -> None:
    texts = np.array(["é", "", "longer"], object)
    pair.writer.begin(1)
    assert_same(pair.sent(texts.astype("T")), texts)


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_bytes_of_every_kind_arrive_as_bytes(kind: Any) -> None:
    assert sent({"a": [kind(b"\0text")]}, None, None) == {"a": [b"\0text"]}


def test_arrays_of_a_run_stay_while_the_memory_grows(pair: Pair) -> None:
    pair.writer.begin(7)
    assert pair.reader.begun == 7
    values = [np.full(size, size) for size in (3, 200_000, 5, 900_000)]
    for got, value in zip([pair.sent(value) for value in values], values, strict=True):
        assert np.array_equal(got, value)
    pair.writer.begin(8)
    assert pair.reader.begun == 8


@reproducible
@given(STRINGS)
def test_equal_inputs_have_equal_hashes(strings: Any) -> None:
    copied = pickle.loads(pickle.dumps(strings))
    assert digest_of_inputs("m", {"x": strings, "y": np.arange(2)}) == digest_of_inputs(
        "m", {"y": np.arange(4)[:2], "x": copied}
    )


def test_different_inputs_have_different_hashes() -> None:
    inputs: list[dict[str, Any]] = [
        {"x": np.array(["a", "b"], object)},
        {"x": np.array(["ab"], object)},
        {"x": np.array([b"a", b"b"], object)},
        {"x": np.array(["b'a'", "b'b'"], object)},
        {"x": np.array([b"'a'", b"'b'"], object)},
        {"x": np.zeros((2, 3))},
        {"x": np.zeros((3, 2))},
        {"x": np.zeros((2, 3), "i8")},
        {"y": np.zeros((2, 3))},
        {"x": np.zeros((2, 3)), "y": np.zeros(0)},
    ]
    digests = {digest_of_inputs("m", each) for each in inputs}
    assert len(digests) == len(inputs)
    assert digest_of_inputs("n", inputs[0]) not in digests
