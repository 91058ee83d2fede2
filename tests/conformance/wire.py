"""Cases on a real server process, through an unchanged tritonclient."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import tritonclient.grpc as triton
from conformance.cases import Array, Case, DataSet
from conformance.compare import difference
from support.processes.server import ServerProcess
from tritonclient.utils import InferenceServerException

from tensorferry.protos.inference_pb2 import ModelMetadataRequest
from tensorferry.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tensorferry.protos.tensors import datatype_of

# Options with a window long enough that requests sent together share a batch if they may.
WINDOW = ("--max-queue-delay-ms", "5")

_ANSWER_SECONDS = 60
# The server's default of --max-queue-size.
_MOST_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Verdict:
    """The failure of a case, or its justified refusal; how its model is batched, and its largest batch in requests."""

    wrong: str
    refused: str
    batching: str
    batch_requests: int

    @property
    def batched(self) -> bool:
        """Whether the server found that rows of the model may share batches."""
        return _batched(self.batching)

    def __str__(self) -> str:
        if self.wrong:
            return f"FAILED: {self.wrong} [{self.batching}]"
        if self.refused:
            return f"refused: {self.refused} [{self.batching}]"
        return f"passed [{self.batching}]" + (f", {self.batch_requests} in a batch" if self.batched else "")


def _batched(batching: str) -> bool:
    return batching.startswith("batches")


def model_name(case: Case) -> str:
    """Return the model's name on the server; a name may occur in two kinds."""
    return f"{case.kind}.{case.name}"


@contextmanager
def serving(cases: Sequence[Case], folder: Path, *options: str, transport: str) -> Iterator[Asking]:
    """A server with the models of all these cases, and its caller."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for case in cases:
        path = folder / f"{model_name(case)}.onnx"
        onnx.save(case.model, str(path))
        lines.append(f"  '{model_name(case)}={path}',\n")
    config = folder / "server.toml"
    config.write_text(f"models = [\n{''.join(lines)}]\n")
    # On the CPU, like ONNX Runtime alone.
    server = ServerProcess.start("--config", config, "--device", "cpu", *options, transport=transport)
    try:
        with triton.InferenceServerClient(server.address) as client:
            yield Asking(client, [_served(server, model) for model in server.ready["models"]])
    finally:
        code = server.stop()
    wrong = server.errors()
    if code != 0 or wrong:
        raise AssertionError(f"the server ended with {code}: {''.join(wrong)}")


@dataclass(frozen=True, slots=True)
class _Served:
    """A model on the server: how it is batched, and the axis of the rows of each tensor that has rows."""

    name: str
    batching: str
    axes: Mapping[str, int]


def _served(server: ServerProcess, ready: Mapping[str, str]) -> _Served:
    name = ready["name"]
    # Triton's messages do not have the properties.
    with grpc.insecure_channel(server.address) as channel:
        metadata = GRPCInferenceServiceStub(channel).ModelMetadata(ModelMetadataRequest(name=name))
    pairs = (pair.split("=") for pair in metadata.properties.get("batch_axes", "").split(",") if pair)
    first = {each.name: 0 for each in (*metadata.inputs, *metadata.outputs) if each.shape[:1] == [-1]}
    return _Served(name, ready["batching"], first | {tensor: int(axis) for tensor, axis in pairs})


class Asking:
    """Sends cases to a server."""

    def __init__(self, client: triton.InferenceServerClient, models: Sequence[_Served]) -> None:
        self._client = client
        self._models = {model.name: model for model in models}

    def judge(self, case: Case) -> Verdict:
        """Send the case's data; for a batched model also with other orders of the rows."""
        model = self._models[model_name(case)]
        batching, axes = model.batching, model.axes
        wrong, refused, batch_requests = "", "", 0
        for data in case.data:
            refused = _refusal(data, axes) if _batched(batching) else ""
            reordered = [data]
            if _batched(batching) and not refused:
                reordered = [
                    _reordered(data, partial(np.roll, shift=1), axes),
                    data,
                    _reordered(data, np.flip, axes),
                    data,
                ]
            for asked, answer in zip(reordered, self._answers(case, reordered), strict=True):
                found, together = (_judge_refusal(answer), 0) if refused else _judge(case, asked, answer)
                wrong = wrong or found
                batch_requests = max(batch_requests, together)
        return Verdict(wrong, refused, batching, batch_requests)

    def _answers(self, case: Case, asked: Sequence[DataSet]) -> list[Any]:
        """Return the answer or error of each; all are sent before the first is waited for."""
        answers: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in asked]
        for data, answer in zip(asked, answers, strict=True):
            self._client.async_infer(
                model_name(case),
                [_input(name, array) for name, array in data.inputs.items()],
                lambda result, error, into=answer: into.put(error or result),
                parameters={"explain": True},
            )
        return [answer.get(timeout=_ANSWER_SECONDS) for answer in answers]


def _input(name: str, array: Any) -> triton.InferInput:
    tensor = triton.InferInput(name, list(array.shape), datatype_of(array))
    tensor.set_data_from_numpy(array)
    return tensor


def _refusal(data: DataSet, axes: Mapping[str, int]) -> str:
    """Return why a server refuses the data if it batches the model; "" if it must not."""
    rows = {
        array.shape[axes[name]]
        for name, array in data.inputs.items()
        if name in axes and isinstance(array, np.ndarray)
    }
    if len(rows) > 1:
        return f"inputs of a batched model have the same rows, these have {sorted(rows)}"
    if max(rows) > _MOST_ROWS:
        return f"a request of {max(rows)} rows is more than the queue holds"
    return ""


def _judge_refusal(answer: Any) -> str:
    """Return what is wrong with the answer to data that the server must refuse."""
    status = answer.status() if isinstance(answer, InferenceServerException) else "an answer"
    return "" if status == "StatusCode.INVALID_ARGUMENT" else f"expected INVALID_ARGUMENT, got {status}"


def _judge(case: Case, asked: DataSet, answer: Any) -> tuple[str, int]:
    """Return what is wrong with an answer, and how many requests were in its batch."""
    if isinstance(answer, InferenceServerException):
        return f"{answer.status()}: {answer.message()}", 0
    response = answer.get_response()
    names = [output.name for output in response.outputs]
    if names != list(asked.outputs):
        return f"the outputs are {names}, expected {list(asked.outputs)}", 0
    for name, expected in asked.outputs.items():
        datatype = next(output.datatype for output in response.outputs if output.name == name)
        if datatype != datatype_of(expected):  # type: ignore[arg-type]
            return f"output {name!r} is of datatype {datatype}, expected {datatype_of(expected)}", 0  # type: ignore[arg-type]
        differs = difference(case, name, expected, _text(answer.as_numpy(name)))
        if differs:
            return differs, 0
    return "", response.parameters["batch_requests"].int64_param


def _text(array: Array) -> Array:
    """Return BYTES as ONNX strings."""
    if array.dtype != object:
        return array
    texts = np.empty(array.shape, object)
    texts.reshape(-1)[:] = [element.decode() for element in array.flat]
    return texts


def _reordered(data: DataSet, order: Callable[..., Array], axes: Mapping[str, int]) -> DataSet:
    """Return the data with the rows of each tensor in the order of a function with the argument `axis`."""

    def reordered(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: np.ascontiguousarray(order(each, axis=axes[name])) if name in axes else each
            for name, each in values.items()
        }

    return DataSet(reordered(data.inputs), reordered(data.outputs))
