"""Declared states: pairs of an input and an output that fit, of one model by itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from support.models import small
from support.server.rig import Load

from tensorferry.batcher import StatefulBatcher
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.models.repository.declared_sources import declared_sources
from tensorferry.serving import DeclarationError, onnx, pipeline

MODEL = """(float[N, 2] x, float[N, 2] past, float[N, 3] wide, int64[N, 2] count, float[N, T] free)
=> (float[N, 2] y, float[N, 2] next, int64[N, 2] after, float[N, T] more)
{ next = Add (x, past) s = ReduceSum <keepdims = 1> (wide, one) f = ReduceSum <keepdims = 1> (free, one)
  t = Add (s, f) y = Add (next, t) after = Add (count, count) more = Neg (free) }"""


def build(path: Path) -> Path:
    return small.written(path, MODEL, one=np.array([1]))


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (
            {"nothing": "next"},
            "--state names the input 'nothing', which model 'm' does not have; it has x, past,",
        ),
        (
            {"past": "nothing"},
            "--state names the output 'nothing', which model 'm' does not have; it has y, next,",
        ),
        ({"past": "after"}, "the input is FP32 and the output INT64; both must have one datatype"),
        ({"wide": "next"}, r"the input is \[-1, 3\] and the output \[-1, 2\]; both must have one shape"),
        ({"free": "more"}, r"the input has the variable shape \[-1, -1\], so its first value is unknown"),
    ],
)
def test_states_that_do_not_fit(load: Load, states: Mapping[str, str], reason: str) -> None:
    with pytest.raises(StartError, match=reason):
        load(build, state=tuple(states.items()))


@pytest.mark.parametrize(
    ("text", "state", "kind"),
    [
        ("(float[N, 2] x) => (float[N, 2] y) { y = Neg (x) }", ("x", "y"), "inputs"),
        ("(float[N, 2] x, float[N, 2] s) => (float[N, 2] y) { y = Add (x, s) }", ("s", "y"), "outputs"),
    ],
)
def test_clients_need_an_input_and_an_output(
    load: Load, text: str, state: tuple[str, str], kind: str
) -> None:
    message = f"has only states as {kind}; leave one for the clients out of --state"
    with pytest.raises(StartError, match=message):
        load(lambda path: small.written(path, text), state=(state,))


def test_a_function_has_no_states(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(
        "from tensorferry.serving import FP32, model\n"
        "@model(inputs={'x': FP32[-1]}, outputs={'y': FP32[-1]})\ndef f(x):\n    return x\n"
    )
    config = ServerConfig((ModelSource("app", app),), device="cpu", state=(("x", "y"),))
    (source,) = declared_sources(config.models)
    with pytest.raises(
        StartError, match="model 'f' has the option --state, which only an ONNX model by itself"
    ):
        load_model(source, LoadContext(config, {"cpu": "cpu"}))


def test_a_state_without_an_axis_of_rows(load: Load) -> None:
    """Requests of a model that is not batched run one by one, with whole states."""
    text = "(float[N, 2] x, float[2] past) => (float[N, 2] y, float[2] next) { y = Add (x, past) next = Add (past, past) }"
    model = load(lambda path: small.written(path, text), state=(("past", "next"),), max_batch_size=0)
    assert isinstance(model.batcher, StatefulBatcher)
    assert not model.batched


def test_a_python_file_declares_states() -> None:
    assert onnx("vad.onnx", states={"state": "stateN"}).states == {"state": "stateN"}
    with pytest.raises(
        DeclarationError, match="step 'vad' of pipeline 'p' has states, which only a model by itself"
    ):
        pipeline("p", onnx("vad.onnx", states={"state": "stateN"}))
