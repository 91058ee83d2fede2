"""Which calls may be joined: those with the same form.

A form is everything that calls of one message must have in common. A call without a form is sent
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from tensorferry.client.coalescing.options import Coalesce
from tensorferry.client.connection.channel import CallMetadata
from tensorferry.client.messages.metadata import ModelMetadata
from tensorferry.protos import inference_pb2 as pb

# Property of a model's metadata: the rows of the largest batch that requests share, 0 if they share none.
SHARED_ROWS = "shared_batch_rows"
# The only parameter of requests that may be joined. Others may concern one request, such as `explain`.
_PRIORITY = "priority"
# A call with a shorter timeout, in multiples of the longest wait, is sent alone.
_LEAST_WAITS = 10
# Forms that are remembered for a model; requests of different shapes have different ones.
_MOST_HEADERS = 1024


@dataclass(frozen=True, slots=True)
class Form:
    """What the calls of a message have in common (`key`), and the size of one call."""

    key: Hashable
    rows: int
    nbytes: int
    max_rows: int


class Forms:
    """Forms of the calls of one client.

    `known` returns the metadata of a model and version, None if it was not fetched. `metadata` is
    that of every call of the client. Thread-safe.
    """

    def __init__(
        self,
        options: Coalesce,
        known: Callable[[str, str], ModelMetadata | None],
        metadata: CallMetadata,
    ) -> None:
        self._options = options
        self._known = known
        self._metadata = metadata
        # What was found out for the metadata object beside it. Each access is one operation on a dict.
        self._models: dict[tuple[str, str], tuple[ModelMetadata, _ModelForms]] = {}

    def form(
        self,
        request: pb.ModelInferRequest,
        timeout: float | None,
        options: Mapping[str, Any],
    ) -> Form | None:
        """Return the form of a call with these options of grpcio; None if it must be sent alone."""
        # A call with metadata of its own, such as a trace context, is found by it on the server.
        if options.get("metadata") != self._metadata:
            return None
        if timeout is not None and timeout < _LEAST_WAITS * self._options.max_wait:
            return None
        forms = self._of_model(request.model_name, request.model_version)
        found = None if forms is None else forms.form(request)
        if found is None:
            return None
        # Two digits, so that calls with equal timeouts have equal forms.
        limit = None if timeout is None else f"{timeout:.1e}"
        given = tuple(option for option in options.items() if option[1])
        return Form((found.key, limit, given), found.rows, found.nbytes, found.max_rows)

    def _of_model(self, model: str, version: str) -> _ModelForms | None:
        metadata = self._known(model, version)
        if metadata is None:
            return None
        found = self._models.get((model, version))
        if found is None or found[0] is not metadata:
            found = metadata, _ModelForms(shared_rows(metadata), self._options)
            self._models[model, version] = found
        return found[1]


class _ModelForms:
    """Forms of the requests for one model, by everything in a request but its contents. Thread-safe."""

    def __init__(self, rows: int, options: Coalesce) -> None:
        self._max_rows = rows if options.max_rows is None else min(rows, options.max_rows)
        self._max_bytes = options.max_bytes
        # Each access is one operation on the dict.
        self._by_header: dict[tuple[bytes, int], tuple[Hashable, int] | None] = {}

    def form(self, request: pb.ModelInferRequest) -> Form | None:
        """Return the form of a request, without the options of its call."""
        # Requests with an id of their own are found by it on the server.
        if self._max_rows < 2 or request.id:
            return None
        sizes = [*map(len, request.raw_input_contents)]
        nbytes = sum(sizes)
        if 2 * nbytes > self._max_bytes:
            return None
        # The contents are the last field. To serialise a small request takes less time than to read
        # a few of its fields.
        data = request.SerializeToString()
        contents = sum(1 + max(1, (size.bit_length() + 6) // 7) + size for size in sizes)
        header = data[: len(data) - contents], len(sizes)
        try:
            found = self._by_header[header]
        except KeyError:
            found = self._key_and_rows(request)
            if len(self._by_header) >= _MOST_HEADERS:
                self._by_header.clear()
            self._by_header[header] = found
        return None if found is None else Form(*found, nbytes, self._max_rows)

    def _key_and_rows(self, request: pb.ModelInferRequest) -> tuple[Hashable, int] | None:
        shapes = _shapes(request)
        if shapes is None:
            return None
        rows, tensors = shapes
        if not 0 < rows < self._max_rows:
            return None
        priority = None
        if request.parameters:
            if len(request.parameters) > 1 or _PRIORITY not in request.parameters:
                return None
            priority = request.parameters[_PRIORITY].SerializeToString()
        if any(output.parameters for output in request.outputs):
            return None
        outputs = tuple(output.name for output in request.outputs)
        return (request.model_name, request.model_version, tensors, outputs, priority), rows


def shared_rows(metadata: ModelMetadata) -> int:
    """Return how many rows of several requests the model runs together; 0 if they must not be joined.

    Every input and output needs a variable axis 0. An optional input may change how rows are
    batched, and an input without rows has one value for the whole message.
    """
    stated = metadata.properties.get(SHARED_ROWS, "")
    if not stated.isdecimal() or len(stated) > 9:
        return 0
    tensors = (*metadata.inputs, *metadata.outputs)
    if any(tensor.optional or tensor.shape[:1] != (-1,) for tensor in tensors):
        return 0
    return int(stated)


def _shapes(request: pb.ModelInferRequest) -> tuple[int, Hashable] | None:
    """Return a request's rows, and the names, datatypes and row shapes of its inputs.

    None if its inputs are not raw, have parameters, or do not all have the same rows.
    """
    if not request.inputs or len(request.raw_input_contents) != len(request.inputs):
        return None
    tensors = []
    lengths = set()
    for tensor in request.inputs:
        if tensor.parameters or not tensor.shape:
            return None
        rows, *shape = tensor.shape
        lengths.add(rows)
        tensors.append((tensor.name, tensor.datatype, tuple(shape)))
    return (lengths.pop(), tuple(tensors)) if len(lengths) == 1 else None
