"""The batching proof: models whose rows are independent pass, others are found out and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from server import models
from server.rig import Array, signature, spec

from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.proof import Verdict, prove, sample, working_size
from tensorferry.server.session import Session
from tensorferry.server.words import words_of

Build = Callable[[Path], Path]


def verdict(build: Build, directory: Path) -> Verdict:
    session = Session(build(directory / "m.onnx"))
    return prove(session.signature, session.run, words_of(session.path))


@pytest.mark.parametrize(
    ("build", "size"),
    [
        (models.twice, 4),
        (models.mlp, 4),
        (lambda path: models.mlp(path, np.float16), 4),
        (lambda path: models.mlp(path, np.float64), 4),
        (models.conv, 16),
        (models.lookup, 4),
        (lambda path: models.multiples_only(path, 7), 224),
        (lambda path: models.multiples_only(path, 1), 4),
    ],
    ids=[
        "elementwise",
        "layers and a softmax of each row",
        "FP16",
        "FP64",
        "convolution of at least 5 × 5, argmax",
        "lookup",
        "multiples of 7",
        "any size",
    ],
)
def test_models_with_independent_rows_pass(build: Build, size: int, tmp_path: Path) -> None:
    assert verdict(build, tmp_path) == Verdict(True, "rows run together equal rows run alone", size)


@pytest.mark.parametrize("name", DATATYPES)
def test_every_datatype_passes(name: str, tmp_path: Path) -> None:
    assert verdict(lambda path: models.echo(path, name), tmp_path).batchable


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (models.softmax_over_rows, "output 'share' of a row changes with its neighbours: by "),
        (models.centred, "output 'y' of a row changes with its neighbours: by "),
        (models.running_sum, "output 'y' of a row changes with its neighbours: by "),
        (models.total, "output 'y' has shape [1, 3] for 5 rows: it does not follow the batch axis"),
        (models.noisy, "output 'y' of one row differs from run to run: by "),
        (models.one_row_only, "it runs one row, but not several together (the model failed on this request"),
    ],
    ids=["softmax over rows", "mean over rows", "running sum", "sum over rows", "noise", "one row only"],
)
def test_models_that_mix_rows_are_found_out(build: Build, reason: str, tmp_path: Path) -> None:
    found = verdict(build, tmp_path)
    assert not found.batchable
    assert found.reason.startswith(reason)
    assert found.size == 4


def test_rows_that_are_alike_by_chance_prove_nothing() -> None:
    made = signature(
        spec("x", "BOOL", "batch", 2),
        spec("axes", "INT64", "batch"),
        outputs=(spec("y", "BOOL", "batch", 2),),
    )
    # The first draw is such a chance.
    assert set(sample(made, 5, 4)["axes"]) == {1}

    def run(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        if len(set(inputs["axes"])) > 1:
            raise ValueError("all axes must be the same")
        return {"y": inputs["x"]}

    found = prove(made, run)
    assert (found.batchable, found.reason) == (
        False,
        "it runs one row, but not several together (all axes must be the same)",
    )


def test_a_model_that_drops_words_is_found_out_by_its_own_words(tmp_path: Path) -> None:
    found = verdict(models.without_stop_words, tmp_path)
    assert (found.batchable, found.reason) == (
        False,
        "output 'y' has shape [2] for 5 rows: it does not follow the batch axis",
    )
    assert verdict(lambda path: models.without_stop_words(path, ()), tmp_path).batchable


def test_words_that_are_not_for_the_input_prove_nothing(tmp_path: Path) -> None:
    assert list(words_of(models.spelt(tmp_path / "spelt.onnx"))) == [("one", "two")]
    assert verdict(models.spelt, tmp_path).batchable


def test_what_runs_on_no_random_input_is_not_proved(tmp_path: Path) -> None:
    found = verdict(lambda path: models.multiples_only(path, 11), tmp_path)
    assert (found.batchable, found.size) == (False, None)
    assert found.reason.startswith("it does not run on random input (the model failed on this request")
    assert found.reason.endswith("so nothing can be proved")


# From here on a Python function stands for the model: x [batch, 8] of any datatype → y.
Model = Callable[[Array], Array]


def proved(model: Model, datatype: str = "FP32", precision: float = 0.0) -> Verdict:
    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": model(inputs["x"])}

    made = signature(spec("x", datatype, "batch", 8), outputs=(spec("y", datatype, "batch", 8),))
    return prove(made, run, precision=precision)


def off(by: float) -> Model:
    """Gives a row of a batch of several a little more, relative to the greatest value, than one alone."""

    def model(x: Array) -> Array:
        y = x.astype(np.float64)
        return (y + (by * np.abs(y).max() if len(x) > 1 else 0)).astype(x.dtype)

    return model


def bf16(model: Model) -> Model:
    return lambda bits: model(bits.view(ml_dtypes.bfloat16)).view(np.uint16)


@pytest.mark.parametrize(
    ("datatype", "allowed", "refused"),
    [("FP16", 4e-3, 5e-2), ("FP32", 3e-5, 1e-3), ("FP64", 3e-10, 1e-8)],
)
def test_rounding_is_allowed_and_another_answer_is_not(datatype: str, allowed: float, refused: float) -> None:
    assert proved(off(0), datatype).batchable
    assert proved(off(allowed), datatype).batchable
    found = proved(off(refused), datatype)
    assert not found.batchable
    assert "its values reach" in found.reason


def test_a_device_may_compute_to_less_than_its_outputs_show() -> None:
    assert not proved(off(3e-3), precision=1e-3).batchable
    assert proved(off(3e-3), precision=1e-2).batchable
    assert not proved(off(5e-2), precision=1e-2).batchable
    # It makes nothing stricter.
    assert proved(off(4e-3), "FP16", precision=1e-4).batchable


def test_rounding_of_bf16() -> None:
    assert proved(bf16(off(0.01)), "BF16").batchable
    assert not proved(bf16(off(0.2)), "BF16").batchable


@pytest.mark.parametrize("datatype", ["INT64", "BOOL", "UINT8", "BYTES"])
def test_nothing_is_allowed_where_values_are_exact(datatype: str) -> None:
    def first_row_differs(x: Array) -> Array:
        y = x.copy()
        y[0, 0] = {"BYTES": "other", "BOOL": not y[0, 0]}.get(datatype, 7)
        return y

    assert proved(lambda x: x, datatype).batchable
    found = proved(first_row_differs, datatype)
    assert found.reason.startswith(
        "output 'y' of a row changes with its neighbours: 1 of 8 values are others"
    )


@pytest.mark.parametrize(
    ("model", "batchable"),
    [
        (lambda x: x[::-1].copy(), False),
        (lambda x: np.sort(x, axis=0), False),
        (lambda x: x * len(x), False),
        (lambda x: x * (2 if len(x) == 2 else 1), False),
        (lambda x: x * (2 if len(x) == 3 else 1), False),
        (lambda x: x + x[:1], False),
        (lambda x: x - x.max(), False),
        (lambda x: np.where(x > 0, x, np.inf), True),
        (lambda x: np.where(x > 0, x, np.nan), True),
        (lambda x: np.full_like(x, np.nan), True),
        (lambda x: np.where(x == x.max(), np.nan, x), False),
        (lambda x: np.where(x == x[0], np.inf, x), False),
        (lambda x: np.zeros_like(x), True),
        (lambda x: x[:, :0], True),
        (lambda x: x[:, : len(x)], False),
        (lambda x: x.reshape(-1), False),
        (lambda x: x.sum(), False),
        (lambda x: x[x[:, 0] > 0], False),
    ],
)
def test_what_else_may_become_of_rows(model: Model, batchable: bool) -> None:
    found = proved(lambda x: np.asarray(model(x)))
    assert found.batchable is batchable
    assert batchable or "output 'y'" in found.reason or "not several together" in found.reason


@pytest.mark.parametrize("fails", [lambda x: len(x) > 1, lambda x: True])
def test_the_proof_never_raises(fails: Callable[[Array], bool]) -> None:
    def model(x: Array) -> Array:
        if fails(x):
            raise ValueError("why")
        return x

    found = proved(model)
    assert not found.batchable
    assert "(why)" in found.reason


def test_samples_are_values_that_indices_masks_and_categories_admit() -> None:
    specs = [spec(name, name, "batch", 50, "n") for name in DATATYPES]
    made = sample(signature(*specs), 3, 7)
    for name, array in made.items():
        assert (array.shape, array.dtype) == ((3, 50, 7), DATATYPES[name].storage)
        if DATATYPES[name].storage.kind == "i":
            assert set(array.flat) == {0, 1}
    assert set(made["BYTES"].flat) == {"0", "1"}
    assert np.isfinite(made["FP16"]).all()
    again = sample(signature(*specs), 3, 7)
    assert all((made[name] == again[name]).all() for name in made)


def test_samples_of_scalars_and_fixed_shapes() -> None:
    specs = [spec(f"{name}{len(dims)}", name, *dims) for name in DATATYPES for dims in ((), (2, 3))]
    made = sample(signature(*specs), 5, 7)
    assert {array.shape for name, array in made.items()} == {(), (2, 3)}
    assert [name for name, array in made.items() if not isinstance(array, np.ndarray)] == []


@pytest.mark.parametrize(
    ("dims", "tried"),
    [
        (("batch", 3), [3]),
        (("batch",), [1]),
        (("batch", "n"), [4, 16, 64, 224, 1]),
        ((2, "n"), [4, 16, 64, 224, 1]),
    ],
)
def test_sizes_are_tried_where_a_dimension_varies(dims: tuple[Any, ...], tried: list[int]) -> None:
    seen: list[int] = []

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        seen.append(inputs["x"].shape[-1])
        raise ValueError(f"reason {len(seen)}")

    assert working_size(signature(spec("x", "FP32", *dims)), run) == (None, "reason 1")
    assert seen == tried
