"""Models with custom operators: how they are batched, and every place where a session of theirs is made."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import onnx
import pytest
from support.models import custom_operator, small
from support.server.rig import PATIENCE, Load, fp32

from tensorferry.server.models.config_pbtxt.io_mapping import IoMapping
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.onnx.probes.empty_axes_probe import EmptyAxesProbe, ProbedModel
from tensorferry.server.runtime.checks.check_cache import CheckCache
from tensorferry.server.runtime.files.fp16 import convert_to_fp16
from tensorferry.server.runtime.files.op_libraries import server_libraries
from tensorferry.server.runtime.ort_options import Fp16, OrtOptions
from tensorferry.server.runtime.session import Session

X = fp32(2, 3)


def answers(model: Model) -> list[list[float]]:
    y: list[list[float]] = model.batcher.submit_rows({"x": X}).result(PATIENCE)["y"].tolist()
    return y


relu = partial(custom_operator.model, name="Relu", domain="")


def test_a_library_that_may_replace_operators_ends_the_proof(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The library replaces ONNX's own Relu."""
    proved = load(relu)
    assert (proved.batching_verdict, proved.batcher.settings.steady) == ("proved", True)
    caplog.set_level(logging.INFO)
    twice = custom_operator.library(tmp_path / "relu.so", "Relu", "")
    model = load(relu, custom_ops=(str(twice),))
    assert (model.batching_verdict, model.batcher.settings.steady) == ("tested", False)
    assert "relu.so may replace operators of the graph by its own" in caplog.text
    assert answers(model) == (2 * (X + 1) + 1).tolist()
    mixing = custom_operator.library(tmp_path / "mixing.so", "Relu", "", "minus_mean")
    assert load(relu, custom_ops=(str(mixing),)).batching_verdict == "refused"


def test_custom_operators_stay_in_fp32(load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """ONNX Runtime infers their datatypes. Other operators are converted, and compared with FP32."""
    caplog.set_level(logging.INFO)
    library = custom_operator.library(tmp_path / "twice.so")
    model = load(custom_operator.model, custom_ops=(str(library),), fp16=True)
    assert "model m in FP16: outputs differ from FP32 by at most 0" in caplog.text
    assert answers(model) == (2 * (X + 1) + 1).tolist()
    (tmp_path / "out").mkdir()
    # Weights in a file of their own are found, too.
    onnx.save_model(
        onnx.load(str(tmp_path / "m.onnx")),
        str(tmp_path / "m.onnx"),
        save_as_external_data=True,
        location="weights",
        size_threshold=0,
    )
    convert_to_fp16(tmp_path / "m.onnx", Fp16(1.0), tmp_path / "out", server_libraries((str(library),)))
    converted = onnx.load(str(tmp_path / "out" / "model.onnx"))
    (weight,) = converted.graph.initializer
    assert weight.data_type == onnx.TensorProto.FLOAT16
    (custom,) = (node for node in converted.graph.node if node.domain == custom_operator.DOMAIN)
    casts = {node.output[0]: node.attribute[0].i for node in converted.graph.node if node.op_type == "Cast"}
    assert casts[custom.input[0]] == onnx.TensorProto.FLOAT
    assert list(casts.values()).count(onnx.TensorProto.FLOAT16) == 2, "the input, and after the operator"


def probed(path: Path, library: Path) -> ProbedModel:
    options = OrtOptions(op_libraries=server_libraries((str(library),)))
    return ProbedModel("m", path, options, IoMapping(Session(path, settings=options).signature), 4, 2)


def test_axes_of_length_zero_are_probed_with_the_operators(tmp_path: Path, check_cache: Path) -> None:
    """The result is kept as long as the library does not change."""
    library = custom_operator.library(tmp_path / "twice.so")
    path = small.save(
        tmp_path / "m.onnx",
        [small.node("Twice", "x", "y", domain=custom_operator.DOMAIN)],
        [small.value("x", dims=["batch", "n"])],
        [small.value("y", dims=["batch", "n"])],
    )
    kept = check_cache / "empty-axes"

    def results() -> int:
        given = probed(path, library)
        probe = EmptyAxesProbe(given, CheckCache(path, given.ort_options, ("cpu",)))
        probe.start()
        probe.wait()
        assert probe.found.verdicts == {frozenset({("x", 1)}): ""}
        return len(list(kept.iterdir()))

    assert [results(), results()] == [1, 1]
    # Replaced, not written, because this process has the file mapped.
    changed = tmp_path / "changed.so"
    changed.write_bytes(library.read_bytes() + b"\0")
    changed.replace(library)
    assert results() == 2
