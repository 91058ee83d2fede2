"""An inspection has the loader's decision, the remedies and the measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import mixing, small

from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.onnx.inspection.inspection import Inspection, Wanted, inspect_model
from tensorferry.server.onnx.inspection.model_argument import find_model, models_of_repository, source_in

NOTHING = Wanted(measure=False)
APP = """
from tensorferry.serving import FP32, model, onnx, pipeline, step

@model(inputs={"x": FP32[-1, 3]}, outputs={"y": FP32[-1, 3]}, max_batch_size=4)
def double(x):
    return 2 * x

@model(inputs={"x": FP32[-1, 3]}, outputs={"y": FP32[-1, 3]})
def broken(x):
    raise ValueError("no")

file = onnx("m.onnx")
both = pipeline("both", "double", step("m", inputs={"x": "y"}, outputs={"y": "z"}))
"""


def inspected(path: Path, wanted: Wanted = NOTHING, **options: Any) -> Inspection:
    options = {"device": "cpu", **options}
    source = ModelSource(path.stem, path)
    (found,) = inspect_model(source, ServerConfig((source,), **options), wanted)
    return found


def test_the_options_count_as_for_a_server(tmp_path: Path) -> None:
    path = mixing.hashed(tmp_path / "m.onnx")
    refused = inspected(path, batching="proved")
    assert refused.decision.verdict == "refused"
    assert list(refused.decision.remedies) == ["allow tested models: --batching tested"]
    assert inspected(path, batching="trust").decision.verdict == "trusted"
    assert "leave it out" in inspected(path, max_batch_size=0).decision.remedies[0]
    assert inspected(path, max_batch_size=5).decision.max_batch_size == 5


def test_the_sizes_are_powers_of_two_up_to_64_or_the_largest_batch(tmp_path: Path) -> None:
    path = small.twice(tmp_path / "m.onnx")

    def rows(wanted: Wanted, **options: Any) -> list[int]:
        measured = inspected(path, wanted, **options).measured
        assert measured is not None
        assert measured.stopped == ""
        return [batch.rows for batch in measured.batches]

    assert rows(Wanted(), max_batch_size=300) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert rows(Wanted()) == [1, 2, 4, 8, 16, 32, 64]
    assert rows(Wanted(sizes=(3, 5))) == [3, 5]


def test_batches_of_a_refused_model_are_measured_as_they_would_be(tmp_path: Path) -> None:
    found = inspected(mixing.scaled(tmp_path / "m.onnx"), Wanted(sizes=(1, 2)))
    assert found.measured is not None
    assert [batch.rows for batch in found.measured.batches] == [1, 2]


def test_a_model_that_is_not_rewritten_shows_all_that_is_to_change(tmp_path: Path) -> None:
    text = "(float[1, 3] x) => (float[1, 3] y) { m = ReduceMean <axes = [0]> (x) y = Sub (x, m) }"
    found = inspected(small.written(tmp_path / "m.onnx", text), Wanted(sizes=(1, 4)))
    assert "ReduceMean" in found.decision.reason
    # Both another mean and an export with a variable axis are needed.
    remedies = found.decision.remedies
    assert ["x.mean(dim=1)" in remedies[0], "torch.onnx.export" in remedies[1]] == [True, True]
    # A request has no rows, so one size is measured.
    assert found.measured is not None
    assert [batch.rows for batch in found.measured.batches] == [1]


def test_a_model_that_runs_on_no_random_input_is_not_measured(tmp_path: Path) -> None:
    path = small.multiples_only(tmp_path / "m.onnx", 5)
    found = inspected(path, Wanted())
    why = "it does not run on random input; --length gives its axes other lengths"
    assert (found.measured, found.not_measured) == (None, why)
    measured = inspected(path, Wanted(sizes=(1,), lengths={"n": 10})).measured
    assert measured is not None
    assert (measured.stopped, measured.lengths) == ("", {"n": 10})


def test_the_models_of_a_python_file_are_measured_through_their_batchers(tmp_path: Path) -> None:
    small.twice(tmp_path / "m.onnx")
    app = tmp_path / "app.py"
    app.write_text(APP)
    source, config = find_model(str(app), {"device": "cpu"}, None)
    found = {each.name: each for each in inspect_model(source, config, Wanted(sizes=(1, 2, 8)))}
    assert {name: each.kind for name, each in found.items()} == {
        "double": "function",
        "broken": "function",
        "m": "onnx",
        "both": "pipeline",
    }
    measured = found["double"].measured
    assert measured is not None
    # Larger requests would be split.
    assert [batch.rows for batch in measured.batches] == [1, 2]
    assert measured.memory == ""
    assert found["broken"].measured is None
    assert found["broken"].not_measured == (
        "it does not run on random input: step 'broken' raised ValueError: no"
    )
    assert found["m"].decision.verdict == "proved"
    assert found["both"].decision.verdict == "tested"
    assert found["both"].measured is not None


def test_a_length_is_that_of_the_models_with_the_axis(tmp_path: Path) -> None:
    small.twice(tmp_path / "m.onnx")
    small.multiples_only(tmp_path / "n.onnx", 5)
    app = tmp_path / "app.py"
    app.write_text("from tensorferry.serving import onnx\nm, n = onnx('m.onnx'), onnx('n.onnx')\n")
    source, config = find_model(str(app), {"device": "cpu"}, None)
    found = inspect_model(source, config, Wanted(sizes=(1,), lengths={"n": 10}))
    assert [each.measured and each.measured.lengths for each in found] == [{}, {"n": 10}]
    with pytest.raises(StartError, match="--length names the axis 'k'; the inputs have 'n' besides"):
        list(inspect_model(source, config, Wanted(sizes=(1,), lengths={"k": 10})))


def test_a_path_that_the_system_refuses_is_named(tmp_path: Path) -> None:
    """As one below a directory that this process may not enter, which root may."""
    model = tmp_path / ("x" * 300) / "m.onnx"
    with pytest.raises(StartError, match=r"/m.onnx cannot be read: .*File name too long"):
        find_model(str(model), {"device": "cpu"}, None)
    assert models_of_repository(model) == []


def test_the_share_of_padding_is_measured(tmp_path: Path) -> None:
    """The function returns rows of 3 tokens, which the encoder gets padded to 4, in eighths of 16."""
    small.mean_of_numbers(tmp_path / "m.onnx")
    app = tmp_path / "app.py"
    app.write_text("""
import numpy as np
from tensorferry.serving import FP32, INT64, model, onnx, pipeline

@model(inputs={"x": FP32[-1]}, outputs={"ids": INT64[-1, -1], "mask": INT64[-1, -1]})
def tokens(x):
    return [np.arange(3) for _ in x], [np.ones(3, np.int64) for _ in x]

mean = onnx("m.onnx", pad_lengths=("sequence", [16]), pad_values={"ids": 0, "mask": 0})
p = pipeline("p", tokens, mean)
""")
    source, config = find_model(str(app), {"device": "cpu"}, None)
    (found,) = inspect_model(source, config, Wanted(sizes=(1, 2)))
    assert found.measured is not None
    assert found.measured.padding_waste == 0.25


def test_an_ensemble_is_inspected_with_the_models_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a" / "1").mkdir(parents=True)
    small.twice(tmp_path / "a" / "1" / "model.onnx")
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text("""
        platform: "ensemble" max_batch_size: 8
        input { name: "u" data_type: TYPE_FP32 dims: 3 } output { name: "v" data_type: TYPE_FP32 dims: 3 }
        ensemble_scheduling {
          step { model_name: "a" model_version: -1 input_map { key: "x" value: "u" } output_map { key: "y" value: "v" } }
        }""")
    source = source_in(tmp_path / "m")
    (found,) = inspect_model(source, ServerConfig((source,), device="cpu"), Wanted(sizes=(1, 4)))
    assert (found.kind, found.decision.verdict) == ("ensemble", "proved")
    assert found.measured is not None
    assert [batch.rows for batch in found.measured.batches] == [1, 4]
    (tmp_path / "a" / "1" / "model.onnx").unlink()
    with pytest.raises(StartError, match=r"a/1/model\.onnx: no such file"):
        list(inspect_model(source, ServerConfig((source,), device="cpu"), NOTHING))
