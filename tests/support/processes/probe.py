"""Requests to the probe model, and a stream that reports when they have reached the server."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

MARKER = "marker"
TABLE_ERROR = "Gather node: indices element out of data bounds, idx=99"
WAIT_SECONDS = 60


def _numbers(tag: int, rows: int, first: float | None) -> npt.NDArray[np.float32]:
    x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) + tag * 1000
    if first is not None:
        x[0, 0] = first
    return x


def inputs(tag: float, rows: int = 1, index: int = 0, work: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Return inputs whose y is 2 * tag + index everywhere. `work` is that of the model `probe`."""
    return {
        "x": np.full((rows, 4), tag, np.float32),
        "index": np.full(rows, index, np.int64),
        "work": np.full(rows, work, np.int64),
    }


def request(
    tag: int,
    *,
    rows: int = 1,
    index: int = 0,
    work: int = 0,
    model: str = "probe",
    first: float | None = None,
) -> pb.ModelInferRequest:
    """Return a request whose answer contains `tag` and describes its batch.

    `first` replaces its first number, which controls a faulty device.
    """
    x = _numbers(tag, rows, first)
    message = pb.ModelInferRequest(model_name=model, id=str(tag))
    message.parameters["explain"].bool_param = True
    for name, datatype, array in (
        ("x", "FP32", x),
        ("index", "INT64", np.full(rows, index, np.int64)),
        ("work", "INT64", np.full(rows, work, np.int64)),
    ):
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    return message


def answer(tag: int, *, rows: int = 1, index: int = 0, first: float | None = None) -> npt.NDArray[np.float32]:
    """Return the expected answer to that request."""
    return 2 * _numbers(tag, rows, first) + index


def output(response: pb.ModelInferResponse) -> npt.NDArray[np.float32]:
    """Return the output y of a response."""
    (y,) = response.outputs
    return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(tuple(y.shape))


def batch_of(response: pb.ModelInferResponse) -> int:
    """Return the number of the request's batch."""
    return response.parameters["batch_number"].int64_param


@contextmanager
def stub_of(address: str) -> Iterator[Any]:
    """Return a stub of the service, on a channel of its own."""
    with grpc.insecure_channel(address) as channel:
        yield inference_pb2_grpc.GRPCInferenceServiceStub(channel)


class OpenStream:
    """A ModelStreamInfer that a test writes and reads."""

    def __init__(self, channel: grpc.Channel, *, timeout: float | None = WAIT_SECONDS) -> None:
        self._requests: queue.SimpleQueue[pb.ModelInferRequest | None] = queue.SimpleQueue()
        self.answers: dict[str, pb.ModelStreamInferResponse] = {}
        self.call: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
            iter(self._requests.get, None),
            timeout=timeout,
            metadata=(("tensorferry-stream-order", "completion"),),
        )
        self._responses: Iterator[pb.ModelStreamInferResponse] = iter(self.call)

    def send(self, *requests: pb.ModelInferRequest) -> None:
        """Send the requests, and wait until the server has accepted or refused each of them.

        A request for an unknown model is refused at once, and a stream is read in order. So
        everything before it has been read once that refusal arrives.
        """
        for message in requests:
            self._requests.put(message)
        self._requests.put(pb.ModelInferRequest(model_name="no-such-model", id=MARKER))
        self.answers.pop(MARKER, None)
        self.await_answer(MARKER)

    def await_answer(self, request_id: str) -> pb.ModelStreamInferResponse:
        """Read until the answer with this id."""
        while request_id not in self.answers:
            response = next(self._responses)
            self.answers[response.infer_response.id] = response
        return self.answers[request_id]

    def half_close(self) -> None:
        """Close the client's side."""
        self._requests.put(None)

    def cancel(self) -> None:
        """Cancel the call."""
        self.call.cancel()
        self.half_close()
