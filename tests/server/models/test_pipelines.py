"""Pipelines of functions and ONNX models are loaded and answer, stage by stage."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import sentence_encoder, small
from support.models.declared import Load
from support.server.rig import infer, request

from tensorferry.batcher import Batcher, Pipeline, Request
from tensorferry.server.errors import InvalidRequestError, StartError, StepFailedError
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.python.functions.app_file import import_app
from tensorferry.serving import (
    FP32,
    INT64,
    STRING,
    FunctionModel,
    InvalidInput,
    PipelineModel,
    model,
    onnx,
    pipeline,
    step,
    tokenizer,
)


@model(inputs={"a": FP32[-1, 3]}, outputs={"b": FP32[-1, 3]})
def add_one(a: Any) -> Any:
    return a + np.float32(1)


@model(inputs={"text": STRING[-1]}, outputs={"ids": INT64[-1, -1], "mask": INT64[-1, -1]}, max_batch_size=64)
def tokens(text: Any) -> Any:
    if "" in text:
        raise InvalidInput("the text is empty")
    return [np.arange(1, len(one) + 1) for one in text], [np.ones(len(one), np.int64) for one in text]


@model(inputs={"input_ids": INT64[-1, -1]}, outputs={"sum": INT64[-1]})
def add_ids(input_ids: Any) -> Any:
    return input_ids.sum(axis=1)


def rows(*values: float) -> np.ndarray[Any, Any]:
    return np.array([[value] * 3 for value in values], np.float32)


def test_steps_of_equal_batches_share_one_batcher(load_declared: Load, tmp_path: Path) -> None:
    small.twice(tmp_path / "twice.onnx")
    twice = onnx("twice.onnx")
    served = load_declared(pipeline("p", step(twice, outputs={"y": "a"}), add_one, outputs=["b", "a"]))
    assert isinstance(served.batcher, Batcher)
    assert str(served.signature) == "(x: FP32[-1, 3]) -> (b: FP32[-1, 3], a: FP32[-1, 3])"
    answer = served.batcher.submit_rows({"x": rows(1, 2)}).result()
    assert answer["b"].tolist() == rows(3, 5).tolist()
    assert answer["a"].tolist() == rows(2, 4).tolist()
    assert [(each.name, each.kind, each.stage) for each in served.steps] == [
        ("twice", "onnx", "twice+add_one"),
        ("add_one", "python", "twice+add_one"),
    ]
    # Without the warm-up.
    assert [sum(times.batches for times in each.times) for each in served.steps] == [1, 1]


def test_rows_of_different_lengths_are_padded_and_batched_by_length(
    load_declared: Load, tmp_path: Path
) -> None:
    small.mean_of_numbers(tmp_path / "mean.onnx")
    mean = onnx("mean.onnx", pad_lengths=("sequence", [4, 8]), pad_values={"ids": 0, "mask": 0})
    served = load_declared(pipeline("p", tokens, mean))
    assert isinstance(served.batcher, Pipeline)
    assert [stage.name for stage in served.batcher.stages] == ["tokens", "mean"]
    texts = ["a", "abc", "abcdefg", "ab"]
    (output,) = [spec.name for spec in served.signature.outputs]
    together = served.batcher.submit_rows({"text": np.array(texts, object)}).result()[output]
    alone = [
        served.batcher.submit_rows({"text": np.array([text], object)}).result()[output] for text in texts
    ]
    assert np.allclose(together, np.concatenate(alone), atol=1e-6)
    assert np.allclose(np.ravel(together), [np.arange(1, len(text) + 1).mean() for text in texts], atol=1e-6)


@pytest.mark.parametrize("kind", ["own", "named", "pipeline"])
def test_rows_of_a_model_that_counts_padding_run_apart(
    kind: str, load_declared: Load, tmp_path: Path
) -> None:
    """A request of several texts gets the answers of each text alone."""
    small.plain_mean(tmp_path / "mean.onnx")

    @model(inputs={"text": STRING[-1]}, outputs={"x": FP32[-1, -1, 2]})
    def letters(text: Any) -> Any:
        return [np.array([[ord(letter)] * 2 for letter in one], np.float32) for one in text]

    @model(inputs={"y": FP32[-1, 2]}, outputs={"same": FP32[-1, 2]}, max_batch_size=8)
    def keep(y: Any) -> Any:
        return y

    mean: Any = onnx("mean.onnx")
    if kind == "named":
        mean = load_declared(mean).name
    elif kind == "pipeline":
        mean = load_declared(pipeline("inner", mean, keep, outputs=["y", "same"])).name
    served = load_declared(pipeline("p", letters, mean))
    means = served.batcher.submit_rows({"text": np.array(["ab", "abcde", "f", "gh"], object)}).result()["y"]
    assert means[:, 0].tolist() == [ord("a") + 0.5, ord("c"), ord("f"), ord("g") + 0.5]


def test_the_padding_of_a_stage_of_several_steps_has_the_pipelines_names(
    load_declared: Load, tmp_path: Path
) -> None:
    small.mean_of_numbers(tmp_path / "mean.onnx")
    mean = onnx("mean.onnx", pad_lengths=("sequence", [4, 8]), pad_values={"ids": 0, "mask": 0})
    inputs = {"ids": "numbers", "mask": "which"}

    @model(inputs={"mean": FP32[-1]}, outputs={"negative": FP32[-1]})
    def negate(mean: Any) -> Any:
        return -mean

    served = load_declared(pipeline("p", step(mean, inputs=inputs), negate))
    assert isinstance(served.batcher, Batcher)
    assert served.padding is not None
    assert set(served.padding.inputs) == {"numbers", "which"}
    ones = np.ones((1, 3), np.int64)
    answer = served.batcher.submit_rows({"numbers": ones * 2, "which": ones}).result()
    assert np.allclose(answer["negative"], -2)


def test_a_padded_output_that_a_pipeline_leaves_out_is_not_missed(
    load_declared: Load, tmp_path: Path
) -> None:
    small.masked_mean(tmp_path / "mean.onnx")
    mean = onnx("mean.onnx", pad_lengths=("sequence", [4]), pad_values={"ids": 0, "mask": 0})
    served = load_declared(pipeline("p", step(mean, inputs={"ids": "numbers"}), outputs=["mean"]))
    registry = ModelRegistry()
    registry.mark_ready(served)
    ones = np.ones((1, 3), np.int64)
    response = infer(InferenceService(registry), request({"numbers": ones, "mask": ones}, model="p"))
    assert [(output.name, [*output.shape]) for output in response.outputs] == [("mean", [1, 4])]


def test_a_served_model_is_a_step_by_its_name(load_declared: Load, tmp_path: Path) -> None:
    small.twice(tmp_path / "twice.onnx")
    shared = load_declared(onnx("twice.onnx"))
    served = load_declared(pipeline("p", add_one, step("twice", inputs={"x": "b"})))
    assert served.batcher.submit_rows({"a": rows(1)}).result()["y"].tolist() == rows(4).tolist()
    assert shared.batcher.statistics().answered == 1
    with pytest.raises(
        StartError, match="pipeline 'q', step 'gone': Request for unknown model: 'gone' is not found"
    ):
        load_declared(pipeline("q", "gone"))


def test_a_served_model_with_states_is_no_step(load_declared: Load, tmp_path: Path) -> None:
    small.keeping(tmp_path / "keeping.onnx")
    load_declared(onnx("keeping.onnx", states={"past": "next"}))
    with pytest.raises(StartError, match="'p' has 'keeping' as a step, which keeps states of sequences"):
        load_declared(pipeline("p", add_one, step("keeping", inputs={"x": "b"})))


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_bad_row_of_32_in_each_step(load_declared: Load, bad: int) -> None:
    """31 answers, and one error that names the step."""
    started, go_on = threading.Event(), threading.Event()

    def make(number: int, batch: int) -> FunctionModel:
        def run(x: Any) -> Any:
            if number == 0 and x[0] == -1:
                started.set()
                go_on.wait(60)
            if number == bad and (x == 13).any():
                raise ValueError("secret")
            return x

        names = ["x", "y", "z", "w"]
        return model(
            inputs={names[number]: INT64[-1]},
            outputs={names[number + 1]: INT64[-1]},
            name=f"step{number}",
            max_batch_size=batch,
        )(run)

    # The first two form a stage, the last one has its own.
    served = load_declared(pipeline("p", make(0, 32), make(1, 32), make(2, 16)))
    held = served.batcher.submit_rows({"x": np.array([-1])})
    assert started.wait(60)
    futures = [served.batcher.submit_rows({"x": np.array([n])}) for n in range(32)]
    go_on.set()
    assert held.result(60)["w"].tolist() == [-1]
    outcomes = [future.exception(60) or future.result()["w"].tolist() for future in futures]
    error = outcomes.pop(13)
    assert isinstance(error, StepFailedError)
    assert f"step 'step{bad}' of model 'p' failed" in str(error)
    assert "secret" not in str(error)
    assert outcomes == [[n] for n in range(32) if n != 13]


@pytest.mark.parametrize("steady", [True, False])
def test_a_steady_stage_may_run_on_a_transports_thread_and_calls_no_other_model(
    load_declared: Load, tmp_path: Path, steady: bool
) -> None:
    small.twice(tmp_path / "twice.onnx")
    entered: list[str] = []

    @contextmanager
    def calls(model: str, requests: Sequence[Request]) -> Iterator[None]:
        entered.append(model)
        yield

    @model(inputs={"y": FP32[-1, 3]}, outputs={"z": FP32[-1, 3]}, steady=steady)
    def copied(y: Any) -> Any:
        return y

    served = load_declared(pipeline("p", onnx("twice.onnx"), copied), calls=calls)
    assert served.batcher.submit_rows({"x": rows(1)}).result(60)["z"].tolist() == rows(2).tolist()
    assert served.batcher.settings.steady is steady
    assert entered == ([] if steady else ["p"])


def test_batched_and_unbatched_steps_do_not_mix(load_declared: Load) -> None:
    whole = model(inputs={"b": FP32[3, 3]}, outputs={"c": FP32[()]}, name="whole", max_batch_size=0)(np.trace)
    declared: PipelineModel = pipeline("p", add_one, whole)
    with pytest.raises(StartError):
        load_declared(declared)


def test_a_tokenizer_reads_a_bounded_part_of_a_text_and_its_time_counts(
    load_declared: Load, tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    sentence_encoder.build(tmp_path)
    served = load_declared(
        pipeline("p", tokenizer(tmp_path / "tokenizer.json", outputs=("input_ids",)), add_ids)
    )
    assert isinstance(served.batcher, Pipeline)
    # Clients split larger requests, because its metadata has the bound.
    assert [spec.most_bytes for spec in served.signature.inputs] == [8 << 20]
    most = 32 * 1024

    def asked(*texts: str) -> Any:
        return served.batcher.submit_rows({"text": np.array(texts, object)})

    blank, long, short = asked("a", " " * 8 * most), asked("a man " * most), asked("a man")
    assert long.result()["sum"].tolist() == asked("a man " * 16).result()["sum"].tolist()
    assert short.result()["sum"].tolist() == asked("a man").result()["sum"].tolist()
    with pytest.raises(InvalidRequestError, match=f"has a text of {8 * most} characters; .* at most {most} "):
        blank.result()
    # Admission adds the time of the tokenizer to that of the next step.
    stages = [stage.model().batcher for stage in served.batcher.stages]
    learned = [bucket.device for stage in stages for bucket in stage.statistics().buckets.values()]
    assert len(learned) >= len(stages) == 2
    assert None not in learned


@pytest.mark.parametrize("processes", [0, 1])
def test_no_step_changes_what_another_step_or_the_client_reads(
    load_declared: Load, tmp_path: Path, processes: int
) -> None:
    """A softmax in place after an ONNX step, whose logits are asked for as well. The check at load does not reach the write."""
    small.twice(tmp_path / "twice.onnx")
    app = tmp_path / "app.py"
    app.write_text(
        "import numpy as np\n"
        "from tensorferry.serving import FP32, model, onnx, pipeline\n\n"
        f"@model(inputs={{'y': FP32[-1, 3]}}, outputs={{'p': FP32[-1, 3]}}, check=False, processes={processes})\n"
        "def softmax(y):\n"
        "    np.exp(y, out=y)\n"
        "    return y / y.sum(axis=1, keepdims=True)\n\n"
        "p = pipeline('p', onnx('twice.onnx'), softmax, outputs=['y', 'p'])\n"
    )
    served = load_declared(import_app(app)["p"])
    for count in (1, 2):
        with pytest.raises(StepFailedError) as failed:
            served.batcher.submit_rows({"x": rows(*range(count))}).result()
        assert "app.py:6: 'np.exp(y, out=y)' writes to a read-only array" in failed.value.reason


def test_a_step_whose_rows_affect_each_other_gets_each_request_alone(load_declared: Load) -> None:
    @model(inputs={"x": FP32[-1, 3]}, outputs={"a": FP32[-1, 3]})
    def centred(x: Any) -> Any:
        return x - x.mean(axis=0)

    served = load_declared(pipeline("p", centred, add_one))
    assert served.batching_verdict == "refused"
    futures = [served.batcher.submit_rows({"x": rows(n, n + 2)}) for n in range(16)]
    assert all(future.result()["b"].tolist() == rows(0, 2).tolist() for future in futures)
