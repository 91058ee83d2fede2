"""Requests that match no template: they are parsed and decoded, and most become a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tensorferry.batcher import SequenceTag, StatefulBatcher
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.config.limits import RequestLimits
from tensorferry.server.errors import InvalidRequestError, ServerError
from tensorferry.server.inference.pending_inference import (
    PendingArguments,
    PendingInference,
    SharedMemoryInference,
)
from tensorferry.server.inference.requests.codec import decode_request
from tensorferry.server.inference.requests.request_templates import (
    Match,
    RequestTemplateCache,
    outputs_without_run,
    uncached_template,
)
from tensorferry.server.inference.responses.responses import check_response_size, id_field_of
from tensorferry.server.inference.shared_memory.regions import RegionLease, Regions
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.wire import structure
from tensorferry.server.wire.parameters import read_parameters
from tensorferry.server.wire.receiving import parse


class UnmatchedRequest:
    """One request, read in the order `parse`, `model`, `match`, `pending`. Each of them may raise. `accepted` is last.

    `request_id` and `addressed` (name and version of the model) hold what is known so far, for the error reply.
    `empty_outputs` are the outputs of a request without rows, for which no model runs. `lease` has the shared memory of its
    tensors, and is to be released if no batcher accepts the request. Not thread-safe.
    """

    def __init__(self, data: bytes, regions: Regions, limits: RequestLimits) -> None:
        self.request_id = ""
        self.addressed = ("", "")
        self.empty_outputs: Mapping[str, Any] | None = None
        self._data = data
        self._limits = limits
        self.lease = RegionLease(regions)
        self._message: pb.ModelInferRequest
        # What the request begins again with the model that serves, although an older one may have it.
        self._begun_again: list[tuple[StatefulBatcher, SequenceTag]] = []

    def parse(self) -> None:
        """Check the message against the bounds and parse it."""
        try:
            structure.check_message(self._data, pb.ModelInferRequest)
        except InvalidRequestError:
            self.request_id = structure.peek_request_id(self._data)
            raise
        self._message = parse(self._data, pb.ModelInferRequest)
        self.request_id = self._message.id
        self.addressed = self._message.model_name, self._message.model_version

    def model(self, registry: ModelRegistry, retired: Sequence[Model], client: str, stream: object) -> Model:
        """Return the newest model that knows the request's sequence, also of the retired ones; else the one that serves.

        Raises as `ModelRegistry.get` does.
        """
        name, version = self.addressed
        sequence = read_parameters(self._message).sequence if retired else None
        if sequence is not None:
            tag = SequenceTag(sequence.id, client, stream)
            models = [each for each in retired if each.name == name and version in ("", each.version)]
            if not sequence.start:
                with suppress(ServerError):
                    models.append(registry.get(name, version))
            for model in reversed(models):
                if not isinstance(model.batcher, StatefulBatcher):
                    continue
                if sequence.start:
                    self._begun_again.append((model.batcher, tag))
                elif model.batcher.knows(tag):
                    return model
        return registry.get(name, version)

    def accepted(self) -> None:
        """End the older sequences in whose place the request has begun one. Not before, because one that is refused ends none."""
        for batcher, tag in self._begun_again:
            batcher.end_sequence(tag)

    def match(self, model: Model, templates: RequestTemplateCache | None, generation: int) -> Match:
        """Decode the request for its model, and return its template and what is its own. Without `templates` none is kept."""
        self.addressed = model.name, model.version
        decoded = decode_request(
            self._message,
            model.name,
            model.signature,
            model.batched,
            self.lease,
            self._limits,
            message_bytes=len(self._data),
            queue_rows=model.batcher.settings.max_queue_size,
        )
        check_response_size(decoded, model.batched, self._limits.message_bytes)
        self.empty_outputs = outputs_without_run(model, decoded)
        if self.lease or self.empty_outputs is not None or templates is None:
            template = uncached_template(model, decoded, self._limits.message_bytes)
        else:
            template = templates.add(self._data, self._message, model, decoded, generation)
        return template, self.request_id, id_field_of(self.request_id), decoded.tensors, template.sequence

    def pending(self, *request: *PendingArguments) -> PendingInference:
        """Return the request for the batcher. It releases the shared memory when it has an outcome."""
        if self.lease:
            return SharedMemoryInference(self.lease, *request)
        return PendingInference(*request)
