"""Each exception has one status; an unexpected one is INTERNAL, and its text never reaches a client."""

from __future__ import annotations

import logging

import grpc
import pytest

from tensorferry import batcher
from tensorferry.client.connection.retry import ANSWERED_KEY
from tensorferry.protos.tensors import TensorError
from tensorferry.server import errors
from tensorferry.server.status import Status, status_of, trailing_metadata

SECRET = "/home/somebody/model.onnx: password"

MAPPED = [
    (errors.InvalidRequestError, "INVALID_ARGUMENT"),
    (TensorError, "INVALID_ARGUMENT"),
    (batcher.InvalidRequest, "INVALID_ARGUMENT"),
    (batcher.RequestTooLarge, "INVALID_ARGUMENT"),
    (errors.NotFoundError, "NOT_FOUND"),
    (errors.AlreadyExistsError, "ALREADY_EXISTS"),
    (errors.LimitError, "RESOURCE_EXHAUSTED"),
    (errors.NotReadyError, "UNAVAILABLE"),
    (batcher.BatcherClosed, "UNAVAILABLE"),
    (batcher.Cancelled, "CANCELLED"),
    (errors.UnsupportedError, "UNIMPLEMENTED"),
    (errors.ModelFailedError, "INTERNAL"),
]


@pytest.mark.parametrize(("kind", "code"), MAPPED)
def test_a_mapped_exception_keeps_its_message_and_has_tritons_code(
    kind: type[Exception], code: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert status_of(kind("what to change")) == Status(grpc.StatusCode[code], "what to change")
    assert status_of(kind("what to change"), triton=True) == status_of(kind("what to change"))
    assert not caplog.records


@pytest.mark.parametrize("code", ["UNAVAILABLE", "NOT_FOUND"])
def test_unavailable_marks_that_the_server_is_alive(code: str) -> None:
    """The bundled client repeats a call more than once only with this mark, which a dead server cannot send."""
    trailers = dict(trailing_metadata(Status(grpc.StatusCode[code], "the model is not ready")))
    assert (ANSWERED_KEY in trailers) == (code == "UNAVAILABLE")


def test_a_model_whose_outputs_have_no_rows_is_reported_with_what_to_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    status = status_of(batcher.ModelRowsError("output 'y' has shape [1], expected 2 rows"))
    assert status.code is grpc.StatusCode.INTERNAL
    assert "--max-batch-size 0" in status.message
    assert status.message.endswith(
        "max_batch_size: 0, inputs and outputs: output 'y' has shape [1], expected 2 rows"
    )
    assert not caplog.records


OVERLOAD = [
    (batcher.QueueFull("full", 0.25), "RESOURCE_EXHAUSTED", "Exceeds maximum queue size: full", 0.25),
    (batcher.Shed("dropped", 0.25), "RESOURCE_EXHAUSTED", "Exceeds maximum queue size: dropped", 0.25),
    (batcher.DeadlineExceeded("late"), "DEADLINE_EXCEEDED", "Request timeout expired: late", None),
]


@pytest.mark.parametrize(("error", "code", "message", "retry_after"), OVERLOAD, ids=str)
def test_overload_has_tritons_text_and_on_request_its_code(
    error: Exception, code: str, message: str, retry_after: float | None
) -> None:
    assert status_of(error) == Status(grpc.StatusCode[code], message, retry_after)
    assert status_of(error, triton=True) == Status(grpc.StatusCode.UNAVAILABLE, message, retry_after)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(SECRET),
        MemoryError(SECRET),
        SystemExit(SECRET),
        batcher.BatcherError(SECRET),
        errors.StartError(SECRET),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_text_of_any_other_exception_is_only_logged(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    status = status_of(error)
    assert status == Status(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert SECRET in caplog.text


@pytest.mark.parametrize("letter", ["x", "é", "終", "🚢", "\ud800"])
def test_a_message_always_fits_the_trailing_metadata(letter: str) -> None:
    message = status_of(errors.NotFoundError(letter * 100_000)).message
    assert len(message.encode()) <= 1510
    assert message.endswith(" ...")
    assert status_of(errors.NotFoundError("é" * 700)).message == "é" * 700


def test_a_message_without_utf_8_is_sent_all_the_same() -> None:
    """No transport could encode it, and the call would never end."""
    assert status_of(errors.NotFoundError("no file /data/\udcff")).message == "no file /data/?"


def test_an_exception_that_is_a_status_holds_no_frames() -> None:
    """The frames hold the request and its reply; the reply holds the exception, which would be a cycle."""
    try:
        try:
            raise ValueError
        except ValueError:
            raise errors.InvalidRequestError("what to change") from None
    except errors.InvalidRequestError as error:
        caught = error
    status_of(caught)
    assert (caught.__traceback__, caught.__context__) == (None, None)
