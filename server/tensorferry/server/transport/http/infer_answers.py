"""Inference answers of the v2 protocol: from a serialised ModelInferResponse to an HTTP response."""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.inference.reply import Piece
from tensorferry.server.transport.http.answers import OCTETS, dumps, response, response_head
from tensorferry.server.transport.http.infer_requests import AnswerForm
from tensorferry.server.transport.http.json_values import json_values, value_of

_MAX_KEPT = 256
# Characters that stand for themselves in JSON.
_PLAIN = re.compile(rb"[ !#-\[\]-~]+")
# Answers of JSON alone that are as long are compressed if the client takes that.
COMPRESSED_BYTES = 4 << 10


class _Layout(NamedTuple):
    """An answer without its id and its tensors: the JSON between the data of its outputs.

    `start` comes before the id: the head of the response, too, if no output has its data in JSON. `texts` has one part more
    than there are such outputs, which are `in_json` by their position. `binary` has the positions of the others.
    """

    start: bytes
    texts: Sequence[bytes]
    in_json: Sequence[tuple[int, str, str, Sequence[int]]]
    binary: Sequence[int]
    binary_bytes: int


class AnswerTranslator:
    """Translates answers, and keeps their constant parts. Thread-safe."""

    def __init__(self) -> None:
        # Needs no lock, because threads can only replace a value by an equal one.
        self._layouts: dict[tuple[Any, ...], _Layout] = {}

    def response(self, pieces: Sequence[Piece], form: AnswerForm, *, gzipped: bool = False) -> bytes:
        """Return the HTTP response for a ModelInferResponse in pieces, as `InferenceReply.pieces` returns them.

        HttpError if an output cannot be written as JSON. With `gzipped`, a long answer of JSON alone is compressed.
        """
        contents: Sequence[Piece]
        if len(pieces) > 2:
            # The head, the id, and for each output the bytes before it and its contents.
            request_id, contents = _json_of_id(pieces[1]), pieces[3::2]
            key = (form, len(request_id), *pieces[::2])
            layout = self._layouts.get(key)
            if layout is None:
                message = pb.ModelInferResponse.FromString(b"".join(pieces))
                layout = _layout_of(message, form, len(request_id))
                if len(self._layouts) >= _MAX_KEPT:
                    self._layouts.clear()
                self._layouts[key] = layout
        else:
            message = pb.ModelInferResponse.FromString(b"".join(pieces))
            request_id, contents = dumps(message.id) if message.id else b"", message.raw_output_contents
            layout = _layout_of(message, form, len(request_id))
        tensors = [contents[at] for at in layout.binary]
        if not layout.in_json:
            return b"".join((layout.start, request_id, layout.texts[0], *tensors))
        parts = [layout.start, request_id]
        for text, (at, name, kind, shape) in zip(layout.texts, layout.in_json, strict=False):
            raw = contents[at]
            values = json_values(name, kind, shape, raw if isinstance(raw, bytes) else raw.tobytes())
            parts += text, dumps(values)
        head = b"".join((*parts, layout.texts[-1]))
        if gzipped and not layout.binary_bytes and len(head) >= COMPRESSED_BYTES:
            return response(200, gzip.compress(head, 1), headers="Content-Encoding: gzip\r\n")
        return b"".join((_head(len(head), layout.binary_bytes), head, *tensors))


def _head(json_bytes: int, binary_bytes: int) -> bytes:
    """Return the head of a response. As in Triton, an answer without a byte after the JSON is JSON alone."""
    if not binary_bytes:
        return response_head(200, json_bytes)
    line = f"Inference-Header-Content-Length: {json_bytes}\r\n"
    return response_head(200, json_bytes + binary_bytes, OCTETS, line)


def _layout_of(message: pb.ModelInferResponse, form: AnswerForm, id_bytes: int) -> _Layout:
    """Return the layout of an answer whose id has this length as JSON; 0 for none."""
    answer: dict[str, Any] = {"model_name": message.model_name, "model_version": message.model_version}
    if message.parameters:
        answer["parameters"] = {name: value_of(each) for name, each in sorted(message.parameters.items())}
    start, text = (b'{"id":', b",") if id_bytes else (b"{", b"")
    texts, in_json, binary, binary_bytes = [text + dumps(answer)[1:-1] + b',"outputs":['], [], [], 0
    for at, (tensor, raw) in enumerate(zip(message.outputs, message.raw_output_contents, strict=True)):
        described: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        if tensor.parameters:
            described["parameters"] = {name: value_of(each) for name, each in tensor.parameters.items()}
        if form.is_binary(tensor.name):
            described.setdefault("parameters", {})["binary_data_size"] = len(raw)
            binary.append(at)
            binary_bytes += len(raw)
        texts[-1] += (b"," if at else b"") + dumps(described)
        if not form.is_binary(tensor.name) and tensor.name not in form.shared:
            texts[-1] = texts[-1][:-1] + b',"data":'
            texts.append(b"}")
            in_json.append((at, tensor.name, tensor.datatype, tuple(tensor.shape)))
    texts[-1] += b"]}"
    if not in_json:
        start = _head(len(start) + id_bytes + len(texts[0]), binary_bytes) + start
    return _Layout(start, texts, in_json, binary, binary_bytes)


def _json_of_id(id_field: bytes) -> bytes:
    """Return an id as JSON, given its serialised field; b"" for none."""
    # Its tag and its length have two bytes.
    if len(id_field) < 130 and _PLAIN.fullmatch(id_field, 2):
        return b'"' + id_field[2:] + b'"'
    request_id = pb.ModelInferResponse.FromString(id_field).id
    return dumps(request_id) if request_id else b""
