"""Inference answers of the v2 protocol: from a serialised ModelInferResponse to an HTTP response."""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.inference.responses.stream_responses import Piece
from tensorferry.server.transport.http.answers import OCTETS, dumps, response
from tensorferry.server.transport.http.infer_requests import AnswerForm
from tensorferry.server.transport.http.parameters import value_of
from tensorferry.server.transport.http.tensor_json import json_values

_MAX_KEPT = 256
# Characters that stand for themselves in JSON.
_PLAIN = re.compile(rb"[ !#-\[\]-~]+")
# Answers of JSON alone that are as long are compressed if the client takes that.
COMPRESSED_BYTES = 4 << 10


class _Layout(NamedTuple):
    """An answer without its id and its tensors: the JSON between the data of its outputs.

    `texts` has one part more than there are outputs with data in JSON, which are `in_json` by their position.
    """

    texts: tuple[bytes, ...]
    in_json: tuple[tuple[int, str, str, tuple[int, ...]], ...]
    binary: tuple[int, ...]


class AnswerTranslator:
    """Translates answers, and keeps their constant parts. Thread-safe."""

    def __init__(self) -> None:
        # Needs no lock, because threads can only replace a value by an equal one.
        self._layouts: dict[tuple[Any, ...], _Layout] = {}

    def response(self, pieces: Sequence[Piece], form: AnswerForm, *, gzipped: bool = False) -> bytes:
        """Return the HTTP response for a ModelInferResponse in pieces, as `InferenceReply.pieces` returns them.

        HttpError if an output cannot be written as JSON. With `gzipped`, a long answer of JSON alone is compressed.
        """
        if len(pieces) > 2:
            # The head, the id, and for each output the bytes before it and its contents.
            key = (form, *pieces[::2])
            layout = self._layouts.get(key)
            contents: Sequence[Piece] = pieces[3::2]
            if layout is None:
                layout, _, _ = _parsed(b"".join(pieces), form)
                if len(self._layouts) >= _MAX_KEPT:
                    self._layouts.clear()
                self._layouts[key] = layout
            id_text = _json_of_id(pieces[1])
        else:
            layout, contents, request_id = _parsed(b"".join(pieces), form)
            id_text = dumps(request_id) if request_id else b""
        texts = list(layout.texts)
        if id_text:
            texts[0] = b'{"id":' + id_text + b"," + texts[0][1:]
        for at, (index, name, kind, shape) in enumerate(layout.in_json):
            raw = contents[index]
            texts[at] += dumps(
                json_values(name, kind, shape, raw if isinstance(raw, bytes) else raw.tobytes())
            )
        head = b"".join(texts)
        tensors = [contents[index] for index in layout.binary]
        # As in Triton: without a byte after the JSON, the answer is JSON alone.
        if not any(len(each) if isinstance(each, bytes) else each.nbytes for each in tensors):
            if gzipped and len(head) >= COMPRESSED_BYTES:
                return response(200, gzip.compress(head, 1), headers="Content-Encoding: gzip\r\n")
            return response(200, head)
        body = b"".join([head, *tensors])
        return response(200, body, OCTETS, f"Inference-Header-Content-Length: {len(head)}\r\n")


def _parsed(data: bytes, form: AnswerForm) -> tuple[_Layout, Sequence[bytes], str]:
    """Return the layout of a serialised ModelInferResponse, the raw contents of its outputs, and its id."""
    message = pb.ModelInferResponse.FromString(data)
    answer: dict[str, Any] = {"model_name": message.model_name, "model_version": message.model_version}
    if message.parameters:
        answer["parameters"] = {name: value_of(each) for name, each in sorted(message.parameters.items())}
    texts, in_json, binary = [dumps(answer)[:-1] + b',"outputs":['], [], []
    for at, (tensor, raw) in enumerate(zip(message.outputs, message.raw_output_contents, strict=True)):
        shape = tuple(tensor.shape)
        described: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": shape}
        if tensor.parameters:
            described["parameters"] = {name: value_of(each) for name, each in tensor.parameters.items()}
        if form.is_binary(tensor.name):
            described.setdefault("parameters", {})["binary_data_size"] = len(raw)
            binary.append(at)
        text = (b"," if at else b"") + dumps(described)
        if tensor.name in form.shared or form.is_binary(tensor.name):
            texts[-1] += text
        else:
            texts[-1] += text[:-1] + b',"data":'
            texts.append(b"}")
            in_json.append((at, tensor.name, tensor.datatype, shape))
    texts[-1] += b"]}"
    return (
        _Layout(tuple(texts), tuple(in_json), tuple(binary)),
        list(message.raw_output_contents),
        message.id,
    )


def _json_of_id(id_field: bytes) -> bytes:
    """Return an id as JSON, given its serialised field; b"" for none."""
    # Its tag and its length have two bytes.
    if len(id_field) < 130 and _PLAIN.fullmatch(id_field, 2):
        return b'"' + id_field[2:] + b'"'
    request_id = pb.ModelInferResponse.FromString(id_field).id
    return dumps(request_id) if request_id else b""
