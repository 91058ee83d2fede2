"""Messages of the protocol for calls of text endpoints, and responses made of their answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import DATATYPES, decode_raw
from tensorferry.server.errors import NotFoundError
from tensorferry.server.inference.reply import Piece
from tensorferry.server.transport.http.answers import response
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.infer_requests import Describe
from tensorferry.server.transport.http.json_values import checked_string, fields_of, raw_contents
from tensorferry.server.transport.http.text.text_call import (
    TextCall,
    TextEndpoints,
    TextResult,
    check_values,
    names_of,
)
from tensorferry.serving.text_tasks import EMBEDDING, TOKEN_EMBEDDING, TOKENIZE

Models = Callable[[], Sequence[pb.ModelMetadataResponse]]
_TOKENS, _MASK = "tokens", "attention_mask"


class TextForm(NamedTuple):
    """How the answer of a text endpoint is written. `model` is the name by which the client asked, "" if it named none."""

    call: TextCall
    model: str
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
        # Clients compare the name.
        name = self.model or message.model_name
        return response(200, self.call.answer(TextResult(name, values, counts, self.labels, self.normalized)))


class TextRequests:
    """Makes messages of calls. Thread-safe.

    `models` returns the metadata of the models that are ready, `describe` that of one by its name.
    """

    def __init__(self, models: Models, describe: Describe) -> None:
        self._models, self._describe = models, describe

    def message(self, endpoints: TextEndpoints, body: bytes, in_path: str) -> tuple[bytes, TextForm]:
        """Return the serialised ModelInferRequest and how its answer is written. HttpError, or what `describe` raises.

        `in_path` is the name of the model in the path, "" without one.
        """
        fields = fields_of(body)
        in_body = checked_string("model", fields.get("model") or "")
        name = in_path or in_body
        models = [self._named(name)] if name else self._models()
        if isinstance(endpoints, Mapping):
            # By the task of this model, or of the only one with such a task; else that for embeddings.
            tasks = [task for each in models if (task := each.properties.get("task", "")) in endpoints]
            endpoints = endpoints[tasks[0] if len(tasks) == 1 else EMBEDDING]
        call = endpoints(fields)
        fitting = [each for each in models if each.properties.get("task") == call.task]
        if len(fitting) != 1:
            raise self._no_model(call.task, name, models)
        model = fitting[0]
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
        form = TextForm(call, name, labels, "normalized" in model.properties)
        return message.SerializeToString(), form

    def _named(self, name: str) -> pb.ModelMetadataResponse:
        try:
            return self._describe(name, "")
        except NotFoundError:
            for model in self._models():
                if name in names_of(model):
                    return model
            raise

    def _no_model(self, task: str, name: str, models: Sequence[pb.ModelMetadataResponse]) -> HttpError:
        """Return the error of a call without exactly one of these models, of which one is the named one, for its task."""
        named = models[0].properties.get("task") if name else None
        every = self._models() if name else models
        names = [each.name for each in every if each.properties.get("task") == task]
        if name:
            has = f"the task {named!r}" if named else "no task"
            reason = f"model {name!r} has {has}, but this path needs {task!r}"
        else:
            reason = f"{'more than one model has' if names else 'no model has'} the task {task!r}"
        if names:
            choices = (
                f"give one as 'model', or in the path, as /models/NAME/embed: {', '.join(map(repr, names))}"
            )
        elif task in (TOKEN_EMBEDDING, TOKENIZE):
            choices = f"declare one by pipeline(..., task={task!r}) of tensorferry.serving"
        else:
            choices = "declare one by embeddings(), reranker() or classifier() of tensorferry.serving"
        return HttpError(400 if name or names else 404, f"{reason}; {choices}")


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
