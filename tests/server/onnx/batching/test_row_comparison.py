"""The comparison of runs passes models with independent rows, and finds models that mix rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.models import small
from support.server.rig import Array, signature, spec

from tensorferry.server.onnx.batching.comparison_runs import ComparisonSettings
from tensorferry.server.onnx.batching.row_comparison import ComparisonOutcome, RowComparison, compare_rows
from tensorferry.server.runtime.checks.sampling import random_inputs
from tensorferry.server.runtime.files.onnx_file import string_lists
from tensorferry.server.runtime.session import Session

Build = Callable[[Path], Path]


def stopped_clock() -> float:
    """A clock that stands still, so that the comparison runs everything."""
    return 0.0


def compare_model(build: Build, directory: Path) -> RowComparison:
    session = Session(build(directory / "m.onnx"))
    return compare_rows(
        session.signature,
        session.run,
        ComparisonSettings(vocabularies=string_lists(session.path), clock=stopped_clock),
    )


@pytest.mark.parametrize(
    ("build", "size"),
    [(small.conv, 16), (lambda path: small.multiples_only(path, 7), 224)],
    ids=["convolution of at least 5 × 5, argmax", "multiples of 7"],
)
def test_models_with_independent_rows_pass(build: Build, size: int, tmp_path: Path) -> None:
    found = compare_model(build, tmp_path)
    assert (found.outcome, found.working_size) == (ComparisonOutcome.SEPARATE, size), found.reason


@pytest.mark.parametrize(
    ("build", "outcome", "size", "reason"),
    [
        (small.total, "MIXES", 4, "output 'y' has shape [1, 3] for 2 rows: it does not follow the batch axis"),
        (small.noisy, "UNSTABLE", 4, "output 'y' of one row differs from run to run: by "),
        (small.one_row_only, "FAILS", 4, "it runs one row, but not several together (the model failed on this request"),
        (lambda path: small.multiples_only(path, 11), "DOES_NOT_RUN", None, "it does not run on random input (the model failed on"),
    ],
    ids=["sum over rows", "noise", "one row only", "no random input"],
)  # fmt: skip
def test_models_that_mix_rows_are_found(
    build: Build, outcome: str, size: int | None, reason: str, tmp_path: Path
) -> None:
    found = compare_model(build, tmp_path)
    assert (found.outcome.name, found.working_size) == (outcome, size)
    assert found.reason.startswith(reason)


def test_random_rows_differ_in_every_input() -> None:
    made = signature(
        spec("x", "BOOL", "batch", 2),
        spec("axes", "INT64", "batch"),
        outputs=(spec("y", "BOOL", "batch", 2),),
    )
    # The first draw has equal rows by chance.
    assert set(random_inputs(made, 5, 4)["axes"]) == {1}

    def run(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        if len(set(inputs["axes"])) > 1:
            raise ValueError("all axes must be the same")
        return {"y": inputs["x"]}

    found = compare_rows(made, run, ComparisonSettings(clock=stopped_clock))
    assert (found.outcome, found.reason) == (
        ComparisonOutcome.FAILS,
        "it runs one row, but not several together (all axes must be the same)",
    )


def test_a_model_that_drops_words_is_found_with_strings_from_its_file(tmp_path: Path) -> None:
    found = compare_model(small.without_stop_words, tmp_path)
    assert (found.outcome, found.reason) == (
        ComparisonOutcome.MIXES,
        "output 'y' has shape [2] for 5 rows: it does not follow the batch axis",
    )
    found = compare_model(lambda path: small.without_stop_words(path, ()), tmp_path)
    assert found.outcome is ComparisonOutcome.SEPARATE


def test_strings_that_the_model_rejects_are_ignored(tmp_path: Path) -> None:
    assert list(string_lists(small.spelt(tmp_path / "spelt.onnx"))) == [("one", "two")]
    assert compare_model(small.spelt, tmp_path).outcome is ComparisonOutcome.SEPARATE


# In the following tests a Python function replaces the model: x [batch, 8] of any datatype → y.
Model = Callable[[Array], Array]


def compared(model: Model, datatype: str = "FP32", **settings: Any) -> RowComparison:
    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        with np.errstate(all="ignore"):
            return {"y": model(inputs["x"])}

    made = signature(spec("x", datatype, "batch", 8), outputs=(spec("y", datatype, "batch", 8),))
    return compare_rows(made, run, ComparisonSettings(**{"clock": stopped_clock, **settings}))


def off(by: float) -> Model:
    """A model that adds a fraction of a row's greatest value if the batch has several rows."""

    def model(x: Array) -> Array:
        y = x.astype(np.float64)
        return (y + (by * np.abs(y).max(1, keepdims=True) if len(x) > 1 else 0)).astype(x.dtype)

    return model


def bf16(model: Model) -> Model:
    return lambda bits: model(bits.view(ml_dtypes.bfloat16)).view(np.uint16)


@pytest.mark.parametrize(
    ("datatype", "allowed", "refused"),
    [("BF16", 1e-2, 0.2), ("FP16", 4e-3, 5e-2), ("FP32", 3e-5, 1e-3), ("FP64", 3e-10, 1e-8)],
)
def test_rounding_is_tolerated_and_larger_differences_are_not(
    datatype: str, allowed: float, refused: float
) -> None:
    stored = bf16 if datatype == "BF16" else lambda model: model
    assert compared(stored(off(allowed)), datatype).outcome is ComparisonOutcome.SEPARATE
    found = compared(stored(off(refused)), datatype)
    assert found.outcome is not ComparisonOutcome.SEPARATE
    assert "its values reach" in found.reason


def beside_others(x: Array) -> Array:
    """Add a fraction of the batch's greatest value."""
    return x + np.float32(1e-2) * np.abs(x).max() if len(x) > 1 else x


@pytest.mark.parametrize(
    ("model", "thorough", "outcome"),
    [
        (off(1e-2), False, ComparisonOutcome.SEPARATE),
        (off(1e-2), True, ComparisonOutcome.MIXES),
        (off(0.1), False, ComparisonOutcome.MIXES),
        (beside_others, False, ComparisonOutcome.MIXES),
    ],
    ids=["the number of rows", "not proved", "large", "other rows"],
)
def test_a_proved_model_may_amplify_the_rounding_that_depends_on_the_number_of_rows(
    model: Model, thorough: bool, outcome: ComparisonOutcome
) -> None:
    assert compared(model, thorough=thorough).outcome is outcome


def test_the_tolerance_follows_the_precision_of_the_device() -> None:
    assert compared(off(3e-3), precision=1e-3).outcome is not ComparisonOutcome.SEPARATE
    assert compared(off(3e-3), precision=1e-2).outcome is ComparisonOutcome.SEPARATE
    assert compared(off(5e-2), precision=1e-2).outcome is not ComparisonOutcome.SEPARATE
    # A better precision does not make the check stricter.
    assert compared(off(4e-3), "FP16", precision=1e-4).outcome is ComparisonOutcome.SEPARATE


@pytest.mark.parametrize("datatype", ["INT64", "UINT8", "BOOL", "BYTES"])
def test_exact_datatypes_have_no_tolerance(datatype: str) -> None:
    def first_row_differs(x: Array) -> Array:
        y = x.copy()
        y[0, 0] = {"BYTES": "other", "BOOL": not y[0, 0]}.get(datatype, 7)
        return y

    assert compared(lambda x: x, datatype).outcome is ComparisonOutcome.SEPARATE
    found = compared(first_row_differs, datatype)
    assert found.reason.startswith("output 'y' of a row depends on other rows: 1 of 8 values ")


@pytest.mark.parametrize(
    ("model", "batchable"),
    [
        (lambda x: x[::-1].copy(), False),
        (lambda x: x * len(x), False),
        (lambda x: x * (2 if len(x) == 2 else 1), False),
        (lambda x: x * (2 if len(x) == 3 else 1), False),
        (lambda x: x - x.max(), False),
        (lambda x: np.where(x > 0, x, np.inf), True),
        (lambda x: np.full_like(x, np.nan), True),
        (lambda x: np.where(x == x.max(), np.nan, x), False),
        (lambda x: np.zeros_like(x), True),
        (lambda x: x[:, :0], True),
        (lambda x: x[:, : len(x)], False),
        (lambda x: x.reshape(-1), False),
        (lambda x: x[x[:, 0] > 0], False),
    ],
)
def test_special_dependences_on_other_rows(model: Model, batchable: bool) -> None:
    found = compared(lambda x: np.asarray(model(x)))
    assert (found.outcome is ComparisonOutcome.SEPARATE) is batchable, found.reason
    assert batchable or "output 'y'" in found.reason or "not several together" in found.reason


# Rows that interact only for some values.


@pytest.mark.parametrize(
    "model",
    [
        lambda x: np.maximum(np.log(np.abs(x) + 1e-10), np.log(np.abs(x) + 1e-10).max() - 8),
        lambda x: x / max(100, x.max()),
        lambda x: x / max(1, np.abs(x).max() / 1e5),
        lambda x: x * (1 if np.all(x) else 2),
        lambda x: x - (x.min() < -100),
        lambda x: x + 1e-30 * x.sum(),
        lambda x: x * (2 if np.abs(x).max(1).min() < 1e-4 else 1),
        lambda x: x * (2 if len(np.unique(x, axis=0)) < len(x) else 1),
        lambda x: x * (2 if (x == np.inf).any() else 1),
        lambda x: x * (2 if (x == -np.inf).any() else 1),
        lambda x: x * (2 if (np.count_nonzero(x, axis=1) == 1).any() else 1),
        lambda x: x * (2 if (np.ptp(x, axis=1) == 0).any() else 1),
        # The tolerance is relative to the row itself.
        lambda x: np.asarray(x + np.float32(1e-9) * (np.abs(x).max() > 10)),
    ],
)
def test_mixing_for_some_values_only_is_found(model: Model) -> None:
    found = compared(model)
    assert found.outcome is ComparisonOutcome.MIXES
    assert "depends on other rows" in found.reason


def test_one_large_batch_of_all_kinds_is_run_even_if_time_is_short() -> None:
    sizes: list[int] = []

    def model(x: Array) -> Array:
        sizes.append(len(x))
        return np.asarray(x if len(x) < 6 else x / max(100, x.max()))

    found = compared(model, seconds=5, thorough=False, clock=itertools.count().__next__)
    assert found.outcome is ComparisonOutcome.MIXES
    assert 8 <= max(sizes) < 32


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x * (2 if len(x) > 10 else 1),
        lambda x: np.concatenate([x[:10], 2 * x[10:]]),
        lambda x: x[:10],
    ],
    ids=["the number of rows", "the position", "the length"],
)
def test_mixing_in_large_batches_only_is_found(model: Model) -> None:
    assert compared(model).outcome is ComparisonOutcome.MIXES


def test_a_large_batch_that_fails_is_halved() -> None:
    sizes: list[int] = []

    def model(x: Array) -> Array:
        sizes.append(len(x))
        if len(x) > 20:
            raise MemoryError
        return x

    found = compared(model, max_batch_size=64)
    assert found.outcome is ComparisonOutcome.SEPARATE
    assert {64, 32, 16} <= set(sizes)
    assert 16 in found.batches
    assert 32 not in found.batches


def test_kinds_of_rows_on_which_the_model_fails_are_left_out_and_named() -> None:
    def checked(x: Array) -> Array:
        if not np.isfinite(x).all():
            raise ValueError("not finite")
        return x

    assert compared(lambda x: checked(x) / max(100, np.max(x))).outcome is ComparisonOutcome.MIXES
    found = compared(checked)
    assert (found.outcome, found.left_out) == (ComparisonOutcome.SEPARATE, ("NaN", "+inf", "-inf"))
    assert found.extent.endswith("; left out, because the model fails on them: rows of NaN, +inf, -inf")


@pytest.mark.parametrize(("rows", "batchable"), [(2, True), (10**6, False)])
def test_integers_are_tried_as_far_as_the_model_accepts_them(rows: int, batchable: bool) -> None:
    """The model mixes rows if an index is above 1."""

    def model(index: Array) -> Array:
        if index.min() < 0 or index.max() >= rows:
            raise IndexError
        return index * (2 if index.max() > 1 else 1)

    found = compared(model, "INT64")
    assert (found.outcome is ComparisonOutcome.SEPARATE) is batchable, found.reason


def test_integers_that_are_sizes_stop_growing() -> None:
    made = signature(spec("n", "INT64", "batch"), outputs=(spec("y", "INT64", "batch", "n"),))
    seen: list[int] = []

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        seen.append(int(inputs["n"].max()))
        return {"y": np.zeros((len(inputs["n"]), max(1, seen[-1])), np.int64)}

    compare_rows(made, run, ComparisonSettings(clock=stopped_clock))
    assert max(seen) == 8


@pytest.mark.parametrize(
    ("model", "datatype"),
    [
        (lambda x: np.char.add(x.astype(str), "!" if (x == "").any() else "").astype(object), "BYTES"),
        (lambda x: np.char.add(x.astype(str), "!" if (np.char.str_len(x.astype(str)) > 99).any() else "").astype(object), "BYTES"),
        (lambda x: x - (x.min() < 0), "INT32"),
    ],
    ids=["empty", "long", "negative"],
)  # fmt: skip
def test_extreme_strings_and_integers_are_compared(model: Model, datatype: str) -> None:
    assert compared(model, datatype).outcome is ComparisonOutcome.MIXES


def test_rows_of_a_binary_input_are_bytes() -> None:
    made = signature(
        spec("x", "BYTES", "batch", 3, binary=True), outputs=(spec("y", "BYTES", "batch", 3, binary=True),)
    )
    seen: set[object] = set()

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        seen.update(inputs["x"].flat)
        return {"y": inputs["x"]}

    settings = ComparisonSettings(clock=stopped_clock, vocabularies=[("word", "\N{WHITE STAR}")])
    assert compare_rows(made, run, settings).outcome is ComparisonOutcome.SEPARATE
    assert {type(element) for element in seen} == {bytes}
    assert {b"0", b"1", b"", b"-1", b"word", "\N{WHITE STAR}".encode()} <= seen


def test_the_inputs_of_a_row_have_different_kinds() -> None:
    made = signature(
        spec("a", "FP32", "batch", 4), spec("b", "FP32", "batch", 4), outputs=(spec("y", "FP32", "batch", 4),)
    )

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        a, b = inputs["a"], inputs["b"]
        huge_beside_zero = ((np.abs(a).max(1) > 1e3) & (b == 0).all(1)).any()
        return {"y": a * (2 if huge_beside_zero else 1)}

    with np.errstate(all="ignore"):
        found = compare_rows(made, run, ComparisonSettings(clock=stopped_clock))
    assert found.outcome is ComparisonOutcome.MIXES


def test_variation_between_runs_is_not_mixing() -> None:
    """In a tiny row the variation exceeds rounding."""
    generator = np.random.default_rng(0)

    def model(x: Array) -> Array:
        return np.asarray(x + generator.uniform(-1e-9, 1e-9, x.shape).astype(np.float32))

    assert compared(model).outcome is ComparisonOutcome.SEPARATE


def test_a_model_that_fails_on_most_rows_is_not_compared() -> None:
    calls: list[int] = []

    def model(x: Array) -> Array:
        calls.append(len(x))
        if len(calls) > 2:
            raise ValueError("no more")
        return x

    found = compared(model)
    assert found.outcome is ComparisonOutcome.DOES_NOT_RUN
    assert found.reason == "it runs on few random inputs (no more), so running shows nothing"


def test_shared_inputs_are_the_same_in_all_rows_also_if_rows_are_drawn_again() -> None:
    made = signature(
        spec("x", "FP32", "batch", 4), spec("scale", "FP32"), outputs=(spec("y", "FP32", "batch", 4),)
    )

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        x = inputs["x"]
        if (x[:, 0] > 0.5).any():
            raise ValueError("too large")
        return {"y": x * inputs["scale"]}

    with np.errstate(all="ignore"):
        found = compare_rows(made, run, ComparisonSettings(clock=stopped_clock))
    assert found.outcome is ComparisonOutcome.SEPARATE, found.reason
