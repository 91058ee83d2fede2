"""Random inputs: valid values, and sizes with which a model runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support.server.rig import Array, signature, spec

from tensorferry.protos.tensors import DATATYPES
from tensorferry.server.runtime.checks.sampling import random_inputs, working_size


def test_random_inputs_are_valid_as_indices_masks_and_categories() -> None:
    specs = [spec(name, name, "batch", 50, "n") for name in DATATYPES]
    made = random_inputs(signature(*specs, spec("binary", "BYTES", 50, binary=True)), 3, 7)
    binary = made.pop("binary")
    assert binary.dtype == object
    assert set(binary) == {b"0", b"1"}
    for name, array in made.items():
        assert (array.shape, array.dtype) == ((3, 50, 7), DATATYPES[name].storage)
        if DATATYPES[name].storage.kind == "i":
            assert set(array.flat) == {0, 1}
    assert set(made["BYTES"].flat) == {"0", "1"}
    assert np.isfinite(made["FP16"]).all()
    again = random_inputs(signature(*specs), 3, 7)
    assert all((made[name] == again[name]).all() for name in made)


def test_random_inputs_for_scalars_and_fixed_shapes() -> None:
    specs = [spec(f"{name}{len(dims)}", name, *dims) for name in DATATYPES for dims in ((), (2, 3))]
    specs.append(spec("binary", "BYTES", binary=True))
    made = random_inputs(signature(*specs), 5, 7)
    assert {array.shape for name, array in made.items()} == {(), (2, 3)}
    assert {made["BYTES0"].dtype, made["binary"].dtype} == {np.dtype(object)}
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
def test_sizes_are_tried_for_varying_dimensions(dims: tuple[Any, ...], tried: list[int]) -> None:
    seen: list[int] = []

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        seen.append(inputs["x"].shape[-1])
        raise ValueError(f"reason {len(seen)}")

    assert working_size(signature(spec("x", "FP32", *dims)), run) == (None, "reason 1")
    assert seen == tried
