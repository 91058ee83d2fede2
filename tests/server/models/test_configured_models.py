"""Loading models with a config.pbtxt: batching, shapes, instances, warm-up samples, warnings and errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import mixing, small
from support.server.rig import PATIENCE, Array, Load

from tensorferry.server.errors import StartError
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.runtime.session import Session

Build = Callable[[Path], Path]

X = 'input { name: "x" data_type: TYPE_FP32 dims: 3 }'
XY = X + 'output { name: "y" data_type: TYPE_FP32 dims: 3 }'
STATE = 'sequence_batching { state { input_name: "x" output_name: "y" data_type: TYPE_FP32 %s } }'


@pytest.fixture
def load(load: Load, tmp_path: Path) -> Load:
    """Load a model of a repository, with a configuration if given."""

    def make(
        text: str | None, build: Build = small.twice, *, repository: bool = True, **options: Any
    ) -> Model:
        return load(build, text, directory=tmp_path / "m" if repository else None, **options)

    return make


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Batching.


@pytest.mark.parametrize(
    ("text", "build", "most", "merges", "words"),
    [
        ("dynamic_batching { }", small.twice, 16, True, "batches of up to 16 rows (proved)"),
        (
            "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 2500 }" + XY,
            small.twice,
            8,
            True,
            "batches of up to 8 rows after at most 2.5 ms (proved)",
        ),
        ("max_batch_size: 8 " + XY, small.twice, 8, False, "requests of up to 8 rows, each alone (its configuration has no dynamic_batching)"),
        (
            XY.replace("dims: 3", "dims: [ -1, 3 ]"),
            small.twice,
            0,
            False,
            "unbatched (max_batch_size is 0 in its configuration)",
        ),
        (
            "max_batch_size: 8 dynamic_batching { }",
            small.centred,
            8,
            False,
            "requests of up to 8 rows, each alone (ReduceMean mean reduces over the batch axis",
        ),
        (
            "max_batch_size: 8 dynamic_batching { }",
            mixing.hashed_elevens,
            8,
            True,
            "batches of up to 8 rows (trusted, as its configuration has dynamic_batching)",
        ),
        ("max_batch_size: 8", mixing.hashed_elevens, 8, False, "requests of up to 8 rows, each alone (it does not run on random input"),
    ],
)  # fmt: skip
def test_how_a_model_is_batched(
    text: str | None, build: Any, most: int, merges: bool, words: str, load: Load
) -> None:
    model = load(text, build, max_batch_size=16, max_queue_delay=1e-3)
    assert (model.max_batch_size, model.config.max_batch_size) == (most, most)
    assert model.config.HasField("dynamic_batching") is merges
    assert model.batching.startswith(words)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Session, list[float]]]:
    """The session and the first number of each row of every run. Runs block while `gate` is closed."""
    seen: list[tuple[Session, list[float]]] = []
    run = Session.run

    def recorded(self: Session, inputs: Mapping[str, Array]) -> dict[str, Array]:
        seen.append((self, [float(row.flat[0]) for row in next(iter(inputs.values()))]))
        return run(self, inputs)

    monkeypatch.setattr(Session, "run", recorded)
    return seen


# Signatures that clients see.


@pytest.mark.parametrize(("repository", "shown"), [(True, "[-1, 1]"), (False, "[-1]")])
def test_scalars_are_of_shape_1_in_a_repository_as_in_triton(
    load: Load, repository: bool, shown: str
) -> None:
    model = load(None, small.lookup, repository=repository)
    assert str(model.signature) == f"(index: INT64{shown}) -> (y: FP32[-1, 1])"
    index = np.arange(3).reshape((3, 1) if repository else (3,))
    assert model.batcher.submit_rows({"index": index}).result(PATIENCE)["y"].tolist() == [[0], [1], [2]]


# Warm-up samples.

SAMPLE = 'model_warmup { name: "w" batch_size: %d count: 2 inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 %s } } }'


def test_each_instance_runs_a_sample_as_often_as_its_count(
    load: Load, runs: list[tuple[Session, list[float]]], tmp_path: Path
) -> None:
    home = tmp_path / "m" / "warmup"
    home.mkdir(parents=True)
    (home / "sample.bin").write_bytes(np.full(3, 77.0, np.float32).tobytes())
    sample = SAMPLE % (2, 'input_data_file: "sample.bin"')
    load("max_batch_size: 4 instance_group { count: 2 kind: KIND_CPU }" + XY + sample)
    of_the_sample = [session for session, values in runs if values == [77.0, 77.0]]
    assert len(of_the_sample) == 4
    assert len(set(map(id, of_the_sample))) == 2


def test_a_model_with_a_failing_sample_is_not_loaded(load: Load) -> None:
    sample = SAMPLE.replace("FP32", "INT64").replace('"x"', '"index"').replace("dims: 3", "dims: 1")
    with pytest.raises(StartError, match="model 'm': failed to run warmup sample 'w': the model failed"):
        load("max_batch_size: 4 " + sample % (3, "zero_data: true"), lambda path: small.lookup(path, size=0))


# Warnings and errors.


def test_unsupported_fields_and_unknown_parameters_give_warnings(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    load('response_cache { enable: true } parameters { key: "FORCE" value { string_value: "1" } }')
    assert warnings(caplog) == [
        "the configuration of model 'm' has the parameter 'FORCE', which is unknown and ignored",
        "model m: its configuration has response_cache, but no answer is kept; start with --cache 256MiB",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sequence_batching { max_sequence_idle_microseconds: 1 }", "has neither states nor control inputs"),
        (STATE % f"dims: {2**62}", r"state 'x' has dims \[4611686018427387904\]; give those of the input"),
        (STATE % f"dims: {[1] * 80}", r"state 'x' has dims \[1, .*; give those of the input"),
        (
            STATE % 'dims: 3 initial_state { data_type: TYPE_FP32 data_file: "\\000" }',
            "which is no file name",
        ),
        (
            STATE.replace(
                "%s }", 'dims: 3 } control_input { name: "x" control { fp32_false_true: [ 0, 1 ] } }'
            ),
            "has the input 'x' twice; give it one meaning",
        ),
        (
            'sequence_batching { control_input { name: "x" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } } }',
            "control input 'x' has data_type TYPE_FP32; of CONTROL_SEQUENCE_CORRID it must be TYPE_UINT64",
        ),
        ("max_batch_size: -1", "'max_batch_size' must be non-negative for m, got -1"),
    ],
)
def test_invalid_configurations_are_refused(text: str, message: str, load: Load) -> None:
    with pytest.raises(StartError, match=message):
        load(text)


@pytest.mark.parametrize(
    ("policy", "options", "verdict"),
    [
        ("trust", {}, "trusted"),
        ("tested", {"batching": "trust"}, "refused"),
        ("proved", {"batching": "trust"}, "refused"),
    ],
)
def test_the_batching_parameter_of_a_model_precedes_the_option(
    policy: str, options: dict[str, str], verdict: str, load: Load
) -> None:
    text = f'parameters {{ key: "batching" value {{ string_value: "{policy}" }} }}'
    model = load(text, small.centred, **options)
    assert model.batching_verdict == verdict
    assert model.batched is (verdict == "trusted")
    assert model.config.parameters["batching"].string_value == policy


def test_a_tested_model_is_not_batched_if_only_proved_models_are(load: Load) -> None:
    text = "max_batch_size: 8 dynamic_batching { }"
    model = load(text, mixing.hashed)
    assert (model.batching_verdict, model.config.HasField("dynamic_batching")) == ("tested", True)
    model = load(text, mixing.hashed, batching="proved")
    assert (model.batching_verdict, model.config.HasField("dynamic_batching")) == ("refused", False)
    assert "it is only tested" in model.batching
    # dynamic_batching in the file does not change this.
    assert load(text, mixing.hashed_elevens, batching="proved").batching_verdict == "refused"
