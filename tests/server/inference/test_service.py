"""The service: bytes and a deadline in, exactly one completion out."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.server.rig import Array, Replies, fp32, infer, request, response_of, signature, spec

from tensorferry.batcher import Batcher, DeadlineExceeded, Request, RequestTooLarge
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import (
    InvalidRequestError,
    ModelFailedError,
    NotReadyError,
    StepFailedError,
)
from tensorferry.server.inference.requests.unmatched_request import UnmatchedRequest
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.runtime.axes import EmptyAxes
from tensorferry.server.signature import Signature
from tensorferry.server.status import status_of

SIGNATURE = signature(spec("x", "FP32", "batch", "n"), outputs=(spec("y", "FP32", "batch", "n"),))

Serve = Callable[..., InferenceService]


@pytest.fixture
def runner() -> ScriptedRunner:
    """y = 2 x. Batches run once the test opens it."""
    return ScriptedRunner(lambda inputs: {"y": inputs["x"] * 2}, gated=True)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Make a service with the model `m` of a runner. Its batcher is closed after the test."""
    made: list[tuple[Any, Batcher]] = []

    def make(
        runner: Any,
        max_batch_size: int = 4,
        slo: float = math.inf,
        signature: Signature = SIGNATURE,
        **options: Any,
    ) -> InferenceService:
        batcher = Batcher(runner, max_batch_size, **options)
        made.append((runner, batcher))
        registry = ModelRegistry()
        empty_axes = EmptyAxes({frozenset({("x", 1)}): ""})
        registry.mark_ready(
            Model("m", "1", signature, max_batch_size, "", batcher, slo, empty_axes=empty_axes)
        )
        registry.mark_complete()
        return InferenceService(registry)

    yield make
    for runner, batcher in made:
        if isinstance(runner, ScriptedRunner):
            runner.open()
        assert batcher.close(), "a worker did not end"


def submit(
    service: InferenceService, x: Array, deadline: float = math.inf, **fields: Any
) -> tuple[Any, Replies]:
    replies = Replies()
    data = request({"x": x}, **fields).SerializeToString()
    return service.submit(data, deadline, replies), replies


def y(response: pb.ModelInferResponse) -> Any:
    (output,) = response.outputs
    return np.frombuffer(response.raw_output_contents[0], "<f4").reshape(tuple(output.shape)).tolist()


def error_of(replies: Replies) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        response_of(replies.first())
    return caught.value


def test_requests_share_a_batch_and_each_gets_its_own_rows(serve: Serve, runner: ScriptedRunner) -> None:
    service = serve(runner, 8)
    first = submit(service, fp32(1, 2))[1]
    runner.await_batches(1)
    requests = [submit(service, fp32(1, 2) + tag, id=str(tag))[1] for tag in range(5)]
    runner.open()
    assert y(response_of(first.first())) == [[0, 2]]
    for tag, replies in enumerate(requests):
        reply = replies.first()
        assert reply.request_id == str(tag)
        assert (response_of(reply).id, y(response_of(reply))) == (str(tag), [[2 * tag, 2 + 2 * tag]])
    assert [batch["x"].shape[0] for batch in runner.batches] == [1, 5]


def test_very_many_rows_without_columns_are_refused(serve: Serve) -> None:
    message = request({"x": fp32(0, 0)})
    message.inputs[0].shape[:] = [1 << 58, 0]
    with pytest.raises(RequestTooLarge):
        infer(serve(lambda inputs: {"y": inputs["x"]}), message)


def test_no_rows_of_an_output_that_no_array_can_hold_are_refused(serve: Serve) -> None:
    wide = signature(spec("x", "FP32", "batch", "n"), outputs=(spec("y", "FP32", "batch", "n", 768),))
    message = request({"x": fp32(0, 0)})
    message.inputs[0].shape[:] = [0, 1 << 59]
    with pytest.raises(InvalidRequestError, match=r"output 'y' of model 'm': .* larger than an array can be"):
        infer(serve(lambda inputs: {"y": inputs["x"]}, signature=wide), message)


def test_each_raw_bool_reaches_the_model_as_0_or_1(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's Compress counts 255 as 255 rows, and answers with memory of other requests."""
    bools = signature(spec("x", "BOOL", "batch", "n"), outputs=(spec("y", "BOOL", "batch", "n"),))
    service = serve(lambda inputs: {"y": inputs["x"]}, signature=bools)
    for raw in (b"\0\2\xff\1", b"\0\1\0\1", b"\3\0\1\x80"):
        message = request({"x": np.zeros((1, 4), bool)})
        message.raw_input_contents[0] = raw
        assert infer(service, message).raw_output_contents[0] == bytes(map(bool, raw))
        # All but the first match its template.
        monkeypatch.setattr(UnmatchedRequest, "parse", None)


def microseconds(value: int) -> dict[str, pb.InferParameter]:
    return {"timeout": pb.InferParameter(int64_param=value)}


@pytest.mark.parametrize(
    ("parameters", "slo", "deadline"),
    [(microseconds(1), 60.0, math.inf), ({}, 1e-6, math.inf), (microseconds(60_000_000), 1e-6, math.inf)],
    ids=["the request's own", "the model's", "the earlier of both"],
)
def test_the_earliest_of_the_deadlines_counts(
    serve: Serve, runner: ScriptedRunner, parameters: dict[str, Any], slo: float, deadline: float
) -> None:
    service = serve(runner, slo=slo)
    assert isinstance(
        error_of(submit(service, fp32(1, 1), deadline, parameters=parameters)[1]), DeadlineExceeded
    )
    assert not runner.batches


class ClosedByRequest(Batcher):
    """A batcher that another thread closes after the look-up of its model: `meanwhile` runs before the next request is queued."""

    meanwhile: Callable[[], object] | None = None

    def enqueue(self, request: Request, **options: Any) -> Any:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
            self.close()
        return super().enqueue(request, **options)


@pytest.mark.parametrize("known", [False, True], ids=["decoded", "matched"])
@pytest.mark.parametrize("replaced", [False, True], ids=["unloaded", "replaced"])
def test_a_request_moves_to_a_model_that_replaces_its_own_before_it_is_queued(
    replaced: bool, known: bool
) -> None:
    registry = ModelRegistry()
    service = InferenceService(registry)
    closed = ClosedByRequest(lambda inputs: {"y": inputs["x"]}, 4)
    registry.mark_ready(old := Model("m", "1", SIGNATURE, 4, "", closed))
    if known:
        response_of(submit(service, fp32(1, 2))[1].first())
    with Batcher(lambda inputs: {"y": inputs["x"] * 10}, 4) as other:
        new = Model("m", "1", SIGNATURE, 4, "", other)
        closed.meanwhile = lambda: registry.mark_ready(new) if replaced else registry.mark_unloading(old)
        replies = submit(service, fp32(1, 2))[1]
        if replaced:
            assert y(response_of(replies.first())) == [[0, 10]]
        else:
            assert isinstance(error_of(replies), NotReadyError)


def test_an_unloaded_model_is_not_kept_alive(serve: Serve) -> None:
    registry = ModelRegistry()
    service = InferenceService(registry)
    batcher = Batcher(lambda inputs: {"y": inputs["x"]}, 4)
    registry.mark_ready(Model("m", "1", SIGNATURE, 4, "", batcher))
    closed = weakref.ref(batcher)
    for _ in range(2):
        replies = submit(service, fp32(1, 2))[1]
        response_of(replies.first())
        # Each reply and its list refer to each other.
        replies.all.clear()
    registry.mark_unloading(registry.get("m"))
    batcher.close()
    del batcher
    (model,) = registry.models()
    registry.mark_unloaded(model)
    del model
    assert closed() is not None
    service.models_changed()
    assert closed() is None


def test_a_failing_request_gets_its_error_and_the_others_their_results(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    def run(inputs: dict[str, Array]) -> dict[str, Array]:
        if (inputs["x"] == 5).any():
            raise InvalidRequestError("5 is no input")
        if (inputs["x"] < 0).any():
            raise ModelFailedError("the model failed on this request: why") from ValueError("/a/secret/place")
        return {"y": inputs["x"]}

    runner = ScriptedRunner(run, gated=True)
    service = serve(runner)
    first = submit(service, fp32(1, 1))[1]
    runner.await_batches(1)
    replies = [submit(service, np.full((1, 1), x, np.float32), id=f"id{x}")[1] for x in (1, -1, 2, 5)]
    runner.open()
    response_of(first.first())
    # It is not logged.
    assert isinstance(error_of(replies[3]), InvalidRequestError)
    assert [y(response_of(replies[at].first())) for at in (0, 2)] == [[[1]], [[2]]]
    error = error_of(replies[1])
    assert "secret" not in str(error)
    assert status_of(error).message == "the model failed on this request: why"
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert line.getMessage() == "model m failed on request 'id-1': /a/secret/place"


def test_a_function_that_fails_for_lengths_that_differ_is_logged_although_the_request_is_at_fault(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    def run(inputs: dict[str, Array]) -> dict[str, Array]:
        raise StepFailedError("step 's' failed", "step 's' raised ValueError: secret", "Traceback")

    made = signature(spec("x", "FP32", "batch", "n"), spec("z", "FP32", "batch", "n"))
    replies = Replies()
    data = request({"x": fp32(1, 2), "z": fp32(1, 3)}, id="id").SerializeToString()
    trace = "0af7651916cd43dd8448eb211c80319c"
    metadata = [("traceparent", f"00-{trace}-b7ad6b7169203331-01")]
    serve(run, signature=made).submit(data, math.inf, replies, metadata)
    error = error_of(replies)
    assert isinstance(error, InvalidRequestError)
    assert str(error).startswith("step 's' failed; axis 'n' has the lengths 2 (axis 1 of input 'x'), 3")
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert (
        line.getMessage()
        == f"model m failed on request 'id' (trace {trace}): step 's' raised ValueError: secret"
    )
    assert vars(line)["exception"] == "Traceback"


def test_a_draining_server_refuses_requests_and_finishes_accepted_ones(
    serve: Serve, runner: ScriptedRunner
) -> None:
    service = serve(runner)
    accepted = submit(service, fp32(1, 1))[1]
    assert not service.draining
    service.begin_drain()
    assert service.draining
    error = error_of(submit(service, fp32(1, 1))[1])
    assert isinstance(error, NotReadyError)
    assert "shutting down" in str(error)
    runner.open()
    assert y(response_of(accepted.first())) == [[0]]
