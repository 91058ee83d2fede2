"""Ensembles of a repository: loaded after their models, ready with them, and reloaded without a lost request."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.models import small
from support.models.controlled import run_in_thread
from support.models.scaled import with_defaults
from support.models.served_repository import ServedRepository
from support.server.rig import PATIENCE, Array, fp32, infer, request

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import LoadFailedError, NotReadyError
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.models.lifecycle.registry import ModelState
from tensorferry.server.models.repository.declared_sources import declared_sources

READY, UNAVAILABLE = ModelState.READY, ModelState.UNAVAILABLE


def ensemble(
    *steps: tuple[str, str, str],
    inputs: str = "image",
    outputs: str = "scores",
    dims: str = "3",
    most: int = 8,
) -> str:
    """An ensemble of steps (model, tensor read as x, tensor written as y); a model's name may have a version, `m:2`."""
    text = f'platform: "ensemble" max_batch_size: {most}\n'
    for kind, name in (("input", inputs), ("output", outputs)):
        text += f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: [ {dims} ] }}\n'
    text += "ensemble_scheduling {\n"
    for model, read, written in steps:
        name, _, version = model.partition(":")
        text += (
            f'step {{ model_name: "{name}" model_version: {version or -1} input_map {{ key: "x" value: "{read}" }} '
            f'output_map {{ key: "y" value: "{written}" }} }}\n'
        )
    return text + "}\n"


CHAIN = ensemble(("first", "image", "middle"), ("second", "middle", "scores"))


@pytest.fixture
def served(served_repository: ServedRepository) -> ServedRepository:
    """Two models that double their input, for ensembles."""
    served_repository.write("first", small.twice)
    served_repository.write("second", small.twice)
    return served_repository


def test_models_are_loaded_with_their_ensemble(served: ServedRepository) -> None:
    served.write("e", config=CHAIN)
    control = served.start()
    control.load("e")
    assert served.states() == {"e": READY, "first": READY, "second": READY}
    control.unload("e")
    assert served.states()["first"] is READY
    control.load("e")
    control.load("second")
    control.unload("e", dependents=True)
    assert [name for name, state in served.states().items() if state is READY] == ["second"]


def test_ensembles_of_ensembles(served: ServedRepository) -> None:
    served.write("e", config=CHAIN)
    served.write(
        "outer",
        config=ensemble(("e", "image", "scores")).replace('"x"', '"image"').replace('"y"', '"scores"'),
    )
    control = served.start("outer")
    assert served.ask("outer").tolist() == (4 * fp32(2, 3)).tolist()
    control.unload("first")
    assert served.states()["outer"] is UNAVAILABLE
    assert "its steps need model 'first', which is" in served.reason("outer")
    control.load("first")
    assert served.ask("outer").tolist() == (4 * fp32(2, 3)).tolist()
    control.unload("outer", dependents=True)
    assert [name for name, state in served.states().items() if state is READY] == ["first"], (
        "a client loaded it"
    )


def test_ensembles_are_nested_to_a_limit(served: ServedRepository) -> None:
    of_other = ensemble(("NAME", "image", "scores")).replace('"x"', '"image"').replace('"y"', '"scores"')
    served.write("e1", config=ensemble(("first", "image", "scores")))
    for level in range(2, 10):
        served.write(f"e{level}", config=of_other.replace("NAME", f"e{level - 1}"))
    control = served.start()
    with pytest.raises(
        LoadFailedError, match=r"steps of ensemble 'e9' are ensembles, .* for more than 8 levels"
    ):
        control.load("e9")
    control.load("e8")
    assert served.ask("e8").tolist() == (2 * fp32(2, 3)).tolist()
    with pytest.raises(LoadFailedError, match="for more than 8 levels"):
        control.load("e9")


def test_a_step_may_want_a_version(served: ServedRepository) -> None:
    served.write("first", small.centred, version=2)
    served.write("first", config="version_policy { all { } }")
    served.write("e", config=ensemble(("first:1", "image", "scores")))
    served.start("e")
    assert served.ask().tolist() == (2 * fp32(2, 3)).tolist()


def test_a_broken_model_is_the_reason_why_its_ensemble_is_not_loaded(served: ServedRepository) -> None:
    served.write("second", config="batch: 1")
    served.write("e", config=CHAIN)
    served.start("*", strict=False)
    assert served.states() == {"e": UNAVAILABLE, "first": READY}
    assert (
        "ensemble 'e' depends on 'second' which has no loaded version. Model 'second' loading failed"
        in served.reason()
    )
    (served.root / "second" / "config.pbtxt").unlink()
    served.control.load("second")
    assert served.ask().tolist() == (4 * fp32(2, 3)).tolist()


def test_ensembles_in_a_circle_are_refused(served: ServedRepository) -> None:
    def of(step: str) -> str:
        return ensemble((step, "image", "scores"))

    served.write("e", config=of("other"))
    served.write("other", config=of("e"))
    control = served.start("*", strict=False)
    assert served.states()["e"] is UNAVAILABLE
    assert "circular dependency between ensembles: e -> other -> e" in served.reason()
    served.write("other", config=of("first").replace("x", "x"))
    control.load("other")
    served.write("e", config=of("other").replace('"x"', '"image"').replace('"y"', '"scores"'))
    control.load("e")
    assert served.states() == {"e": READY, "first": READY, "other": READY, "second": READY}
    served.write("other", config=of("e"))
    with pytest.raises(LoadFailedError, match="circular dependency between ensembles: other -> e"):
        control.load("other")
    assert served.ask().tolist() == (2 * fp32(2, 3)).tolist(), "the loaded version serves"


def test_no_step_keeps_a_state(served: ServedRepository) -> None:
    """It would begin a sequence with each request."""
    served.write("e", config=CHAIN)
    control = served.start("*")
    states = 'sequence_batching { state { input_name: "past" output_name: "next" data_type: TYPE_FP32 dims: [ 3 ] } }'
    served.write("second", small.keeping, config=f"max_batch_size: 8 {states}")
    control.load("second")
    assert served.states()["e"] is UNAVAILABLE
    with pytest.raises(NotReadyError):
        served.ask()
    with pytest.raises(LoadFailedError, match="'e' has 'second' as a step, which keeps states of sequences"):
        control.load("e")


def test_models_without_rows(served: ServedRepository) -> None:
    whole = 'max_batch_size: 0 input { name: "x" data_type: TYPE_FP32 dims: [ -1, 3 ] } output { name: "y" data_type: TYPE_FP32 dims: [ -1, 3 ] }'
    served.write("first", config=whole)
    served.write("second", config=whole)
    served.write("e", config=CHAIN.replace("dims: [ 3 ]", "dims: [ -1, 3 ]").replace("max_batch_size: 8", ""))
    served.write("mixed", config=CHAIN)
    served.start("*")
    assert not served.registry.get("e").batched
    assert served.ask().tolist() == (4 * fp32(2, 3)).tolist()
    assert served.ask("mixed").tolist() == (4 * fp32(2, 3)).tolist()


def test_inputs_without_rows_and_optional_ones(served: ServedRepository) -> None:
    served.write("first", with_defaults)
    text = CHAIN.replace(
        "output {", 'input { name: "shift" data_type: TYPE_FP32 dims: 3 is_shape_tensor: true }\noutput {', 1
    ).replace('value: "image" }', 'value: "image" } input_map { key: "bias" value: "shift" }')
    served.write("e", config=text)
    served.write("plain", config=CHAIN)
    served.start("*")
    assert served.ask("plain").tolist() == (4 * fp32(2, 3)).tolist(), "the model's own value is used"

    def ask(shift: float) -> Array:
        message = request({"image": fp32(2, 3), "shift": np.full(3, shift, np.float32)}, model="e")
        data = infer(served.service, message).raw_output_contents[0]
        return np.frombuffer(data, np.float32).reshape(2, 3)

    threads = [run_in_thread(partial(ask, shift)) for shift in range(8)]
    for shift, answer in enumerate(threads):
        assert answer.result(PATIENCE).tolist() == (4 * fp32(2, 3) + 2 * shift).tolist()


def test_a_client_may_send_the_configuration_of_an_ensemble(served: ServedRepository) -> None:
    served.write("e", config=CHAIN)
    control = served.start("e")
    config = ModelConfig()
    config.CopyFrom(served.registry.get("e").config)
    del config.ensemble_scheduling.step[1]
    config.ensemble_scheduling.step[0].output_map["y"] = "scores"
    control.load("e", config)
    assert served.ask().tolist() == (2 * fp32(2, 3)).tolist()
    served.write("first", lambda path: small.twice(path, dims=("batch", "n")))
    control.load("first")
    assert served.ask().tolist() == (2 * fp32(2, 3)).tolist(), "its configuration is still what was sent"


def test_a_configuration_is_kept_if_only_some_versions_could_be_loaded_with_it(
    served: ServedRepository,
) -> None:
    served.write("e", config=ensemble(("first", "image", "scores")))
    control = served.start("first")
    served.write("first", version=2)
    sent = parse_config("max_batch_size: 16 version_policy { all { } }", "test")
    with pytest.raises(LoadFailedError, match="version 2 is at UNAVAILABLE state"):
        control.load("first", sent)
    (served.root / "first" / "2").rmdir()
    control.load("e")
    assert served.registry.get("first").max_batch_size == 16


@pytest.mark.parametrize("dependents", [True, False])
def test_unloading_answers_the_requests_that_the_ensemble_has_accepted(
    served: ServedRepository, dependents: bool
) -> None:
    """They still need the models of later steps, which are unloaded at the same time."""
    served.write("gated", small.twice)
    served.write("e", config=ensemble(("gated", "image", "middle"), ("second", "middle", "scores")))
    control = served.start("e")
    answer = run_in_thread(served.ask)
    served.runner.await_batches(1)
    if dependents:
        control.unload("e", dependents=True)
    else:
        control.unload("second")
    with pytest.raises(NotReadyError):
        served.ask()
    served.runner.open()
    assert answer.result(PATIENCE).tolist() == (4 * fp32(2, 3)).tolist()
    assert served.control.drain(time.monotonic() + PATIENCE)


def test_an_ensemble_goes_on_as_before_after_a_failed_load(served: ServedRepository) -> None:
    """Its models stay, and it follows their changes."""
    served.write("e", config=CHAIN)
    served.write("other", config=CHAIN)
    control = served.start("e", "other")
    bad = parse_config(ensemble(("missing", "image", "scores")), "test")
    with pytest.raises(LoadFailedError, match="not available or ambiguous: missing"):
        control.load("e", bad)
    control.unload("other", dependents=True)
    assert served.ask().tolist() == (4 * fp32(2, 3)).tolist()
    for name in ("first", "second"):
        served.write(name, lambda path: small.twice(path, dims=("batch", "n")))
        control.load(name)
    assert served.ask().tolist() == (4 * fp32(2, 3)).tolist()


def test_a_pipeline_of_the_command_line_keeps_its_models(served: ServedRepository, tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(
        "from tensorferry.serving import pipeline, step\n"
        "p = pipeline('p', step('first', inputs={'x': 'image'}, outputs={'y': 'scores'}))\n"
    )
    served.write("e", config=CHAIN)
    control = served.start(named=declared_sources([ModelSource("app", app)]))
    control.load("e")
    control.unload("e", dependents=True)
    assert [name for name, state in served.states().items() if state is READY] == ["first", "p"]
