"""Cases asked of a real server process, by an unchanged tritonclient."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tritonclient.grpc as triton
from conformance.cases import Array, Case, DataSet
from conformance.compare import difference
from e2e.server import ServerProcess
from tritonclient.utils import InferenceServerException

from tensorferry.protos.tensors import datatype_of

_ANSWER_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a case: what went wrong, if anything; how the server batches its model; and the
    most requests that shared a batch with it, itself among them.
    """

    wrong: str
    batching: str
    company: int

    @property
    def batched(self) -> bool:
        """Whether the server found that the rows of its model may share batches."""
        return self.batching.startswith("batches")


def model_name(case: Case) -> str:
    """What the case's model is called on the server: a name may be in two kinds."""
    return f"{case.kind}.{case.name}"


@contextmanager
def serving(cases: Sequence[Case], folder: Path, *options: str, transport: str) -> Iterator[Asking]:
    """A server that has the models of all these cases, and what asks it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for case in cases:
        path = folder / f"{model_name(case)}.onnx"
        onnx.save(case.model, str(path))
        lines.append(f"  '{model_name(case)}={path}',\n")
    config = folder / "server.toml"
    config.write_text(f"models = [\n{''.join(lines)}]\n")
    server = ServerProcess.start("--config", config, *options, transport=transport)
    try:
        with triton.InferenceServerClient(server.address) as client:
            batching = {model["name"]: model["batching"] for model in server.ready["models"]}
            yield Asking(client, batching)
    finally:
        code = server.stop()
    if code != 0:
        raise AssertionError(f"the server ended with {code}: {''.join(server.log)}")


class Asking:
    """Asks a server for the answers of cases."""

    def __init__(self, client: triton.InferenceServerClient, batching: Mapping[str, str]) -> None:
        self._client = client
        self._batching = batching

    def judge(self, case: Case) -> Verdict:
        """Sends the case's data, and among them, where the model is batched, other orders of their rows."""
        batching = self._batching[model_name(case)]
        wrong, company = "", 0
        for data in case.data:
            orders: Sequence[Callable[[Array], Array]] = (_as_it_is,)
            if batching.startswith("batches"):
                orders = (_rolled, _as_it_is, _reversed, _as_it_is)
            reordered = [_reordered(data, order) for order in orders]
            for asked, answer in zip(reordered, self._answers(case, reordered), strict=True):
                found, together = _judge(case, asked, answer)
                wrong = wrong or found
                company = max(company, together)
        return Verdict(wrong, batching, company)

    def _answers(self, case: Case, asked: Sequence[DataSet]) -> list[Any]:
        """The answer to each or the error; all are on their way before the first is waited for."""
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


def _judge(case: Case, asked: DataSet, answer: Any) -> tuple[str, int]:
    """What is wrong with an answer, and how many requests were in its batch."""
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
    """BYTES as the strings that ONNX has."""
    if array.dtype != object:
        return array
    texts = np.empty(array.shape, object)
    texts.reshape(-1)[:] = [element.decode() for element in array.flat]
    return texts


def _reordered(data: DataSet, order: Callable[[Any], Array]) -> DataSet:
    return DataSet(
        {name: order(array) for name, array in data.inputs.items()},
        {name: order(array) for name, array in data.outputs.items()},
    )


def _as_it_is(array: Array) -> Array:
    return array


def _rolled(array: Array) -> Array:
    return np.roll(array, 1, axis=0)


def _reversed(array: Array) -> Array:
    return np.ascontiguousarray(array[::-1])
