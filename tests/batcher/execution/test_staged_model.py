"""Staged models: batches are joined into their arrays, and copied while another batch runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.rig import PATIENCE, dirty, ignore, new_request, reproducible

from tensorferry.batcher import Batcher, StagedModel
from tensorferry.batcher.execution.collate import join

Array = npt.NDArray[Any]
Wanted = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]


class Doubler:
    """y = 2 x in steps; each step is recorded, and computing waits for `go_on`."""

    def __init__(self) -> None:
        self.steps: queue.Queue[tuple[str, float]] = queue.Queue()
        self.go_on = threading.Semaphore(0)
        self.fails = ""

    def place(self, tensors: Wanted) -> Mapping[str, Array] | None:
        return dirty(tensors)

    def load(self, batch: Any) -> Any:
        return self._step("load", batch)

    def __call__(self, batch: Any) -> Any:
        self._step("compute", batch)
        assert self.go_on.acquire(timeout=PATIENCE)
        return {"y": batch["x"] * 2}

    def fetch(self, outputs: Any) -> Any:
        return self._step("fetch", {"x": outputs["y"] / 2}) and outputs

    def _step(self, name: str, batch: Any) -> Any:
        self.steps.put((name, float(batch["x"].flat[0])))
        if name == self.fails:
            raise ValueError(name)
        return batch

    def next(self) -> tuple[str, float]:
        return self.steps.get(timeout=PATIENCE)


def x(value: float, rows: int = 1) -> dict[str, Array]:
    return {"x": np.full((rows, 2), value, np.float32)}


def test_steps_run_in_order_and_overlap_with_another_batch() -> None:
    model = Doubler()
    assert isinstance(model, StagedModel)
    with Batcher([model], 1, pipelined=True) as batcher:
        first = batcher.submit_rows(x(1))
        assert [model.next(), model.next()] == [("load", 1), ("compute", 1)]
        second = batcher.submit_rows(x(2))
        assert model.next() == ("load", 2), "while the first computes"
        model.go_on.release()
        rest = {model.next(), model.next()}
        assert rest == {("fetch", 1), ("compute", 2)}
        model.go_on.release()
        assert model.next() == ("fetch", 2)
        assert first.result(PATIENCE)["y"].tolist() == [[2, 2]]
        assert second.result(PATIENCE)["y"].tolist() == [[4, 4]]


@pytest.mark.parametrize("step", ["load", "compute", "fetch"])
def test_a_failing_step_fails_only_its_batch(step: str) -> None:
    model = Doubler()
    model.fails = step
    for _ in range(3):
        model.go_on.release()
    with Batcher([model], 1) as batcher:
        with pytest.raises(Exception, match=step):
            batcher.submit_rows(x(1)).result(PATIENCE)
        model.fails = ""
        assert batcher.submit_rows(x(3)).result(PATIENCE)["y"].tolist() == [[6, 6]]


def test_without_memory_of_its_own_a_model_gets_the_batchers() -> None:
    class Without(Doubler):
        def place(self, tensors: Wanted) -> None:
            return None

    model = Without()
    model.go_on.release()
    with Batcher([model], 4) as batcher:
        assert batcher.submit_rows(x(1, 3)).result(PATIENCE)["y"].shape == (3, 2)


DTYPES = [np.dtype(name) for name in ("?", "i1", "<i2", "<i8", "u1", "<u8", "<f2", "<f4", "<f8")]


@reproducible
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=2)), min_size=1, max_size=3
    ),
    st.integers(0, 2**32),
)
def test_joining_into_given_memory_gives_the_same_batch(
    rows: list[int], inputs: list[tuple[np.dtype[Any], list[int]]], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    requests = [
        new_request(
            {
                f"i{index}": generator.integers(0, 2, (count, *shape)).astype(dtype)
                for index, (dtype, shape) in enumerate(inputs)
            },
            ignore,
        )
        for count in rows
    ]
    expected, got = join(requests), join(requests, dirty)
    assert expected.keys() == got.keys()
    for name, array in expected.items():
        assert (array.dtype, array.shape, array.tobytes()) == (
            got[name].dtype,
            got[name].shape,
            got[name].tobytes(),
        )


@pytest.mark.parametrize("columns", [1023, 1024, 1025, 5000])
def test_rows_of_any_size_are_joined(columns: int) -> None:
    rows = np.arange(3 * columns, dtype=np.float32).reshape(3, columns)
    requests = [new_request({"x": rows[i : i + 1]}, ignore) for i in range(3)]
    assert join(requests, dirty)["x"].tolist() == rows.tolist()


def test_strings_are_not_copied_into_given_memory() -> None:
    requests = [new_request({"x": np.array([["a"]], object)}, ignore) for _ in range(2)]
    assert join(requests, lambda tensors: pytest.fail("asked"))["x"].tolist() == [["a"], ["a"]]
