"""Messages of the protocol for calls of text endpoints, and responses made of their answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import DATATYPES, decode_raw
from tensorferry.server.errors import NotFoundError, ServerError
from tensorferry.server.inference.reply import Piece
from tensorferry.server.transport.http.answers import response
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.infer_requests import Describe
from tensorferry.server.transport.http.json_values import fields_of, raw_contents
from tensorferry.server.transport.http.text.text_call import (
    TextCall,
    TextEndpoint,
    TextEndpoints,
    TextResult,
    check_values,
    model_in,
    names_of,
)
from tensorferry.serving.text_tasks import EMBEDDING, TOKEN_EMBEDDING, TOKENIZE

Models = Callable[[], Sequence[pb.ModelMetadataResponse]]
_TOKENS, _MASK = "tokens", "attention_mask"


class TextForm(NamedTuple):
    """How the answer of a text endpoint is written."""

    call: TextCall
    labels: Sequence[str]
    normalized: bool

    def response(self, pieces: Sequence[Piece]) -> bytes:
        """Return the HTTP response for a ModelInferResponse in pieces. HttpError if it cannot be written."""
        message = pb.ModelInferResponse.FromString(b"".join(pieces))
        arrays = [
            decode_raw(raw, DATATYPES[tensor.datatype], tensor.shape)
            for tensor, raw in zip(message.outputs, message.raw_output_contents, strict=True)
        ]
        values = arrays[0]
        if self.call.task != TOKENIZE:
            check_values(values, self.labels)
            values = values.astype("<f4", copy=False)
        counts = _token_counts(arrays[1]) if arrays[1:] else ()
        # The name by which the client asked, because clients compare it.
        name = self.call.model or message.model_name
        return response(200, self.call.answer(TextResult(name, values, counts, self.labels, self.normalized)))


class TextRequests:
    """Makes messages of calls. Thread-safe.

    `models` returns the metadata of the models that are ready, `describe` that of one by its name.
    """

    def __init__(self, models: Models, describe: Describe) -> None:
        self._models, self._describe = models, describe

    def message(self, endpoints: TextEndpoints, body: bytes, name: str) -> tuple[bytes, TextForm]:
        """Return the serialised ModelInferRequest and how its answer is written. HttpError, or what `describe` raises.

        `name` is the model in the path, "" without one.
        """
        fields = fields_of(body)
        if isinstance(endpoints, Mapping):
            call = self._of_task(endpoints, name or model_in(fields))(fields)
        else:
            call = endpoints(fields)
        if name:
            call = call._replace(model=name)
        model = self._model(call)
        inputs = model.inputs
        if len(inputs) != len(call.columns):
            raise HttpError(
                400,
                f"model {model.name!r} takes {'pairs of texts' if len(inputs) > 1 else 'single texts'}, and the request has "
                f"{'pairs' if len(call.columns) > 1 else 'single texts'}",
            )
        message = pb.ModelInferRequest(model_name=model.name)
        for spec, column in zip(inputs, call.columns, strict=True):
            message.inputs.add(name=spec.name, datatype="BYTES", shape=[len(column)])
            message.raw_input_contents.append(raw_contents(spec.name, "BYTES", [len(column)], column))
        message.outputs.add(name=_output(model, call))
        counts = _MASK if call.task == TOKEN_EMBEDDING else _TOKENS
        if any(spec.name == counts for spec in model.outputs):
            message.outputs.add(name=counts)
        labels = json.loads(model.properties.get("labels", "[]"))
        return message.SerializeToString(), TextForm(call, labels, "normalized" in model.properties)

    def _of_task(self, endpoints: Mapping[str, TextEndpoint], name: str) -> TextEndpoint:
        """Return the endpoint for the task of this model, or of the only one with such a task; else that for embeddings."""
        models = [self._named(name)] if name else self._models()
        tasks = [task for model in models if (task := model.properties.get("task", "")) in endpoints]
        return endpoints[tasks[0] if len(tasks) == 1 else EMBEDDING]

    def _model(self, call: TextCall) -> pb.ModelMetadataResponse:
        if call.model:
            model = self._named(call.model)
            task = model.properties.get("task")
            if task != call.task:
                has = f"the task {task!r}" if task else "no task"
                raise HttpError(
                    400,
                    f"model {call.model!r} has {has}, but this path needs {call.task!r}; {self._choices(call.task)}",
                )
            return model
        found = [model for model in self._models() if model.properties.get("task") == call.task]
        if len(found) != 1:
            which = "more than one model has" if found else "no model has"
            raise HttpError(
                400 if found else 404, f"{which} the task {call.task!r}; {self._choices(call.task)}"
            )
        return found[0]

    def _named(self, name: str) -> pb.ModelMetadataResponse:
        try:
            return self._describe(name, "")
        except NotFoundError:
            for model in self._models():
                if name in names_of(model):
                    return model
            raise

    def _choices(self, task: str) -> str:
        names = [model.name for model in self._models() if model.properties.get("task") == task]
        if names:
            return (
                f"give one as 'model', or in the path, as /models/NAME/embed: {', '.join(map(repr, names))}"
            )
        if task in (TOKEN_EMBEDDING, TOKENIZE):
            return f"declare one by pipeline(..., task={task!r}) of tensorferry.serving"
        return "declare one by embeddings(), reranker() or classifier() of tensorferry.serving"


def ready_models(index: pb.RepositoryIndexResponse, describe: Describe) -> Sequence[pb.ModelMetadataResponse]:
    """Return the metadata of the models of an index that are ready."""
    found = []
    for name in dict.fromkeys(model.name for model in index.models if model.state == "READY"):
        try:
            found.append(describe(name, ""))
        except ServerError:
            # Unloaded meanwhile.
            continue
    return found


def _output(model: pb.ModelMetadataResponse, call: TextCall) -> str:
    if call.output:
        if all(spec.name != call.output for spec in model.outputs):
            raise HttpError(
                400, f"model {model.name!r} has no output {call.output!r}, which this request needs"
            )
        return call.output
    rank = 3 if call.task == TOKEN_EMBEDDING else 2
    return next(spec.name for spec in model.outputs if spec.datatype == "FP32" and len(spec.shape) == rank)


def _token_counts(tokens: npt.NDArray[Any]) -> Sequence[int]:
    """Return the number of tokens of each text, from these numbers or from their mask. HttpError for padding before tokens."""
    by_text = tokens.reshape(len(tokens), -1)
    if (np.diff(by_text) > 0).any():
        raise HttpError(
            500, f"the output {_MASK!r} of the model has padding before a token; it must be after the tokens"
        )
    counts: list[int] = by_text.sum(axis=1, dtype="i8").tolist()
    return counts
