"""OpenAI's endpoints: /v1/embeddings and /v1/models."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.errors import truncate
from tensorferry.server.transport.http.answers import dumps, json_response
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.json_values import Fields
from tensorferry.server.transport.http.text.text_call import (
    TextCall,
    TextResult,
    names_of,
    number_in,
    shortened,
    texts_in,
    vectors_as_json,
)
from tensorferry.serving.text_tasks import EMBEDDING

_OWNER = "tensorferry"
# Clients want a time for each model.
_STARTED = int(time.time())


def embeddings(fields: Fields) -> TextCall:
    """Parse a call of /v1/embeddings."""
    encoding = fields.get("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise HttpError(
            400, f"'encoding_format' is {truncate(str(encoding))}; it must be 'float' or 'base64'"
        )
    answer = partial(_answer, as_base64=encoding == "base64", dimensions=number_in(fields, "dimensions"))
    return TextCall(EMBEDDING, (_texts(fields),), answer)


def _texts(fields: Fields) -> Sequence[str]:
    given = fields.get("input")
    if given and isinstance(given, list) and set(map(type, given)) <= {int, list}:
        raise HttpError(
            400,
            "'input': token ids are not taken, because they are those of another tokenizer; send strings (LangChain's "
            "OpenAIEmbeddings does with check_embedding_ctx_length=False)",
        )
    return texts_in(fields, "input")


def _answer(result: TextResult, *, as_base64: bool, dimensions: int | None) -> bytes:
    vectors = shortened(result.values, dimensions)
    if as_base64:
        written = [f'"{base64.b64encode(vector.tobytes()).decode()}"' for vector in vectors]
    else:
        written = vectors_as_json(vectors)
    data = ",".join(
        f'{{"object":"embedding","index":{at},"embedding":{each}}}' for at, each in enumerate(written)
    )
    end = dumps({"model": result.model, "usage": usage_of(result.tokens)})
    return b'{"object":"list","data":[' + data.encode() + b"]," + end[1:]


def usage_of(tokens: int) -> Mapping[str, int]:
    """Return OpenAI's count of tokens."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def models(found: Sequence[pb.ModelMetadataResponse], parts: Mapping[str, str]) -> bytes:
    """Answer with the models, also by the other names that they are served as."""
    return json_response({"object": "list", "data": [_model(name) for name in _names(found)]})


def model(found: Sequence[pb.ModelMetadataResponse], parts: Mapping[str, str]) -> bytes:
    """Answer with one model, by the name that was asked for."""
    names = _names(found)
    if parts["name"] not in names:
        raise HttpError(
            404, f"model {truncate(parts['name'])!r} is not found; the server has {', '.join(names)}"
        )
    return json_response(_model(parts["name"]))


def _names(found: Sequence[pb.ModelMetadataResponse]) -> Sequence[str]:
    return list(dict.fromkeys(name for model in found for name in names_of(model)))


def _model(name: str) -> Mapping[str, Any]:
    return {"id": name, "object": "model", "created": _STARTED, "owned_by": _OWNER}
