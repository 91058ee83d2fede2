"""Requests of more rows than a batch whose rows differ in length: each row shares batches with rows of its padded length."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.batcher.pipelines import Puppets, count_up
from support.batcher.rig import PATIENCE, error, reproducible, result

from tensorferry.batcher import Batcher, ModelOutputError, OutOfMemory, Padding, PadInput, Pipeline, Stage
from tensorferry.batcher.testing import ScriptedRunner, VirtualClock

LENGTHS = (2, 4, 8)
PADDING = Padding(LENGTHS, {"ids": PadInput(1, 0), "mask": PadInput(1, False)}, outputs={"doubled": 1})


def masked_sum(inputs: Mapping[str, Any]) -> Any:
    """Return for each row the sum of what the mask leaves, less the number, and each entry doubled."""
    ids = inputs["ids"] * inputs["mask"]
    return {"sum": ids.sum(axis=1) - inputs["length"], "doubled": ids * 2}


def pipeline_of(
    model: Any = masked_sum,
    *,
    tokens: Batcher | None = None,
    most: int = 4,
    outputs: Any = ("sum",),
    clock: VirtualClock | None = None,
    padding: Padding = PADDING,
) -> Pipeline:
    names = ("ids", "mask", "length")
    first = Stage(
        "tokens", tokens or Batcher(count_up, 64, clock=clock), {"x": "x"}, {name: name for name in names}
    )
    batcher = Batcher(model, most, name="model", clock=clock)
    reads = {name: name for name in names}
    gives = {"sum": "sum", "doubled": "doubled"}
    stages = [first, Stage("model", batcher, reads, gives, padding=padding)]
    return Pipeline("p", stages, inputs=["x"], outputs=list(outputs), clock=clock)


def shapes(runner: ScriptedRunner) -> list[tuple[int, int]]:
    return [batch["ids"].shape for batch in runner.batches]


def sum_of(length: int) -> int:
    return length * (length + 1) // 2 - length


@reproducible
@given(
    lengths=st.lists(st.integers(0, 10), min_size=1, max_size=40),
    most=st.integers(1, 6),
    outputs=st.sampled_from([("sum",), ("sum", "doubled")]),
)
def test_each_row_gets_the_answer_that_it_gets_alone(
    lengths: list[int], most: int, outputs: tuple[str, ...]
) -> None:
    """Also rows that are equal, empty, or longer than the largest padded length."""
    with pipeline_of(most=most, outputs=outputs) as pipeline:
        answers = result(pipeline.submit_rows({"x": np.array(lengths, float)}))
    assert answers["sum"].tolist() == [sum_of(length) for length in lengths]
    if "doubled" in outputs:
        rows = [[2 * at if at <= length else 0 for at in range(1, 11)] for length in lengths]
        longest = answers["doubled"].shape[1]
        assert max(lengths) <= longest <= 10
        assert answers["doubled"].tolist() == [row[:longest] for row in rows]


def test_full_batches_have_one_padded_length_the_longest_first() -> None:
    runner = ScriptedRunner(masked_sum)
    lengths = [1, 8, 2, 3, 7, 1, 2, 4, 8, 2, 5, 9, 1, 6, 8]
    with pipeline_of(runner) as pipeline:
        assert result(pipeline.submit_rows({"x": np.array(lengths, float)}))["sum"].tolist() == [
            sum_of(length) for length in lengths
        ]
        statistics = pipeline.statistics()
    # One row is longer than all lengths, so it runs as it is.
    assert shapes(runner) == [(1, 9), (4, 8), (2, 8), (2, 4), (4, 2), (2, 2)]
    rows = [length for length in lengths if length <= 8]
    assert statistics.positions == sum(rows)
    assert statistics.padding_positions == 6 * 8 + 2 * 4 + 6 * 2 - sum(rows)


def test_inputs_of_different_numbers_of_rows_are_the_models_fault() -> None:
    tokens = Batcher(lambda inputs: {**count_up(inputs), "length": np.array([1.0])}, 0)
    with pipeline_of(tokens=tokens, most=1) as pipeline:
        caught = error(pipeline.submit_rows({"x": np.array([1.0, 2])}))
    assert isinstance(caught, ModelOutputError)
    assert "'length': [1]" in str(caught)


def test_a_request_that_fits_into_a_batch_is_one_batch_whose_padding_is_counted() -> None:
    runner = ScriptedRunner(masked_sum)
    with pipeline_of(runner) as pipeline:
        result(pipeline.submit_rows({"x": np.array([1.0, 7, 2])}))
        statistics = pipeline.statistics()
    assert shapes(runner) == [(3, 8)]
    assert (statistics.positions, statistics.padding_positions) == (10, 14)


def test_a_stage_that_divides_fills_up_only_the_padded_axis(puppets: Puppets) -> None:
    def grids(inputs: Mapping[str, Any]) -> Any:
        """Return for each number of two digits an array of this many rows and columns."""
        return {"grid": [np.ones(divmod(int(x), 10)) for x in inputs["x"]]}

    def counts(inputs: Mapping[str, Any]) -> Any:
        grid = inputs["grid"]
        return {"sum": grid.sum(axis=(1, 2)), "width": np.full(len(grid), grid.shape[2])}

    pipeline = puppets.pipeline(
        Stage("grids", puppets.batcher("grids", grids, gated=False), {"x": "x"}, {"grid": "grid"}),
        Stage(
            "counts",
            puppets.batcher("counts", counts, gated=False),
            {"grid": "grid"},
            {"sum": "sum", "width": "width"},
            padding=Padding((4,), {"grid": PadInput(1, 0)}),
            divides=True,
        ),
        outputs=["sum", "width"],
    )
    answers = result(pipeline.submit_rows({"x": np.array([12.0, 32, 23])}))
    assert answers["sum"].tolist() == [2, 6, 6]
    assert answers["width"].tolist() == [2, 2, 3]
    result(pipeline.submit_rows({"x": np.array([12.0, 32])}))
    assert [batch["grid"].shape for batch in puppets.runners["counts"].batches[-1:]] == [(2, 4, 2)]


def test_its_rows_share_batches_with_other_requests() -> None:
    runner = ScriptedRunner(masked_sum, gated=True)
    with pipeline_of(runner) as pipeline:
        first = pipeline.submit({"x": 8.0})
        runner.await_batches(1)
        futures = [pipeline.submit_rows({"x": np.array([1.0, 8, 1, 8, 8])}), pipeline.submit({"x": 7.0})]
        futures.append(pipeline.submit({"x": 2.0}))
        while pipeline.stage_statistics()["model"].sizes.queued_rows < 7:
            threading.Event().wait(0.001)
        runner.open()
        for future, lengths in zip([first, *futures], ([8], [1, 8, 1, 8, 8], [7], [2]), strict=True):
            assert np.ravel(result(future)["sum"]).tolist() == [sum_of(length) for length in lengths]
    assert shapes(runner)[1:] == [(4, 8), (3, 2)]


def test_a_cancelled_request_runs_no_further_batch() -> None:
    runner = ScriptedRunner(masked_sum, gated=True)
    with pipeline_of(runner) as pipeline:
        future = pipeline.submit_rows({"x": np.array([1.0, 8, 1, 8, 3, 4])})
        runner.await_batches(1)
        assert future.cancel()
        runner.open()
        assert pipeline.drain(PATIENCE)
        assert pipeline.statistics().cancelled == 1
    assert shapes(runner) == [(2, 8)]


def test_rows_are_limited_by_memory_for_each_padded_length() -> None:
    """The product of rows and length is bounded, because each padded length has a limit of rows of its own."""

    def small_memory(inputs: Mapping[str, Any]) -> Any:
        if inputs["ids"].size > 32:
            raise OutOfMemory("more than 32 elements")
        return masked_sum(inputs)

    runner = ScriptedRunner(small_memory)
    lengths = np.array([8.0] * 16 + [4.0] * 16 + [2.0] * 16)
    with pipeline_of(runner, most=16, clock=VirtualClock()) as pipeline:
        result(pipeline.submit_rows({"x": lengths}))
        del runner.batches[:]
        again = result(pipeline.submit_rows({"x": lengths}))
    assert again["sum"].tolist() == [sum_of(int(length)) for length in lengths]
    assert shapes(runner) == [(4, 8)] * 4 + [(8, 4)] * 2 + [(16, 2)]


def test_an_input_that_is_an_array_is_divided_with_the_others(puppets: Puppets) -> None:
    """The lengths are an array, and the caller's own input is bytes."""
    names = {"ids": "ids", "mask": "mask"}
    tokens = Stage(
        "tokens", puppets.batcher("tokens", count_up, gated=False), {"x": "x"}, {"ids": "ids", "mask": "mask"}
    )

    def model(inputs: Mapping[str, Any]) -> Any:
        return masked_sum({**inputs, "length": inputs["length"].astype(int)})

    batcher = puppets.batcher("model", model, gated=False, max_batch_size=2)
    reads = {**names, "length": "x"}
    pipeline = puppets.pipeline(
        tokens,
        Stage("model", batcher, reads, {"sum": "sum", "doubled": "doubled"}, padding=PADDING),
        outputs=["sum", "doubled"],
    )
    answers = result(pipeline.submit_rows({"x": np.array([3.0, 1, 2, 4, 1])}))
    assert answers["sum"].tolist() == [3, 0, 1, 6, 0]
    assert answers["doubled"].tolist() == [
        [2, 4, 6, 0],
        [2, 0, 0, 0],
        [2, 4, 0, 0],
        [2, 4, 6, 8],
        [2, 0, 0, 0],
    ]
