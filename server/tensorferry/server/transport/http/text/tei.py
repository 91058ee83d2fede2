"""Endpoints of Hugging Face's Text Embeddings Inference: /embed, /embed_all, /tokenize, /predict and /info."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.transport.http.answers import dumps, json_response
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.json_values import MAX_VALUES, Fields
from tensorferry.server.transport.http.text.text_call import (
    MAX_TEXTS,
    TextCall,
    TextResult,
    check_texts,
    flag_in,
    number_in,
    shortened,
    texts_in,
    vectors_as_json,
)
from tensorferry.serving.text_tasks import (
    CLASSIFY,
    EMBEDDING,
    RERANK,
    TOKEN_EMBEDDING,
    TOKEN_LIST,
    TOKENIZE,
)

# By task. The form of TEI's model types.
_TYPES: Mapping[str, str] = {
    EMBEDDING: "embedding",
    TOKEN_EMBEDDING: "embedding",
    RERANK: "reranker",
    CLASSIFY: "classifier",
}


def embed(fields: Fields) -> TextCall:
    """Parse a call of /embed."""
    normalize = None if fields.get("normalize") is None else flag_in(fields, "normalize")
    answer = partial(_vectors, dimensions=number_in(fields, "dimensions"), normalize=normalize)
    return TextCall(EMBEDDING, (_texts(fields),), answer)


def tokenize(fields: Fields) -> TextCall:
    """Parse a call of /tokenize, which is answered with the tokens of each text."""
    special = fields.get("add_special_tokens") is None or flag_in(fields, "add_special_tokens")
    answer = partial(_tokens, special=special)
    return TextCall(TOKENIZE, (_texts(fields),), answer, TOKEN_LIST)


def _tokens(result: TextResult, *, special: bool) -> bytes:
    lists = [each if isinstance(each, bytes) else each.encode() for each in result.values]
    if not special:
        lists = [dumps([token for token in json.loads(tokens) if not token["special"]]) for tokens in lists]
    return b"[" + b",".join(lists) + b"]"


def embed_all(fields: Fields) -> TextCall:
    """Parse a call of /embed_all, which is answered with the vector of each token."""
    return TextCall(TOKEN_EMBEDDING, (_texts(fields),), _vectors_of_tokens)


def _texts(fields: Fields) -> Sequence[str]:
    check_truncation(fields)
    if fields.get("prompt_name") is not None:
        raise HttpError(400, "'prompt_name' is not supported; send the prompt as the beginning of the text")
    return texts_in(fields, "inputs")


def _vectors(result: TextResult, *, dimensions: int | None, normalize: bool | None) -> bytes:
    if normalize is False and result.normalized:
        raise HttpError(
            400,
            f"'normalize' is false, but model {result.model!r} scales its vectors to length 1; send true, or "
            "declare the model by embeddings(..., normalize=False)",
        )
    return _list(vectors_as_json(shortened(result.values, dimensions, normalize))).encode()


def _vectors_of_tokens(result: TextResult) -> bytes:
    """Return the vectors of the tokens, which are at the start of each row, before its padding."""
    _, length, size = result.values.shape
    if length < max(result.counts):
        raise HttpError(500, f"the model gave {length} vectors for a text of {max(result.counts)} tokens")
    if result.tokens * size > MAX_VALUES:
        raise HttpError(
            400,
            f"the {result.tokens} tokens of 'inputs' have vectors of {size} numbers each, and JSON has at most {MAX_VALUES} "
            "numbers; send fewer texts at once, or call the model by the v2 protocol with binary tensors",
        )
    texts = zip(result.values, result.counts, strict=True)
    return _list([_list(vectors_as_json(vectors[:count])) for vectors, count in texts]).encode()


def _list(parts: Sequence[str]) -> str:
    return f"[{','.join(parts)}]"


def check_truncation(fields: Fields) -> None:
    """Raise HttpError for a direction in which texts are not cut. They are cut as the tokenizer's file says."""
    if str(fields.get("truncation_direction") or "right").lower() != "right":
        raise HttpError(
            400, "'truncation_direction' must be 'Right'; texts are cut as the tokenizer's file says"
        )


def predict(fields: Fields) -> TextCall:
    """Parse a call of /predict. Its inputs are a text, a pair, or a list in which each text or pair is a list."""
    check_truncation(fields)
    given = fields.get("inputs")
    one = isinstance(given, str) or (isinstance(given, list) and all(isinstance(each, str) for each in given))
    rows: Any = [given] if one else given
    if not isinstance(rows, list):
        raise HttpError(400, "'inputs' must be a string, a pair of strings, or a list of lists of them")
    lists = [[each] if isinstance(each, str) else each for each in rows]
    sizes = {len(each) if isinstance(each, list) else 0 for each in lists}
    if len(sizes) != 1 or not sizes <= {1, 2}:
        raise HttpError(400, "'inputs' must have one string each, or two strings each for pairs")
    columns = tuple([row[at] for row in lists] for at in range(sizes.pop()))
    for column in columns:
        check_texts(column, "inputs")
    output = "logits" if flag_in(fields, "raw_scores") else "scores"
    return TextCall(CLASSIFY, columns, partial(_classes, one=one), output)


def _classes(result: TextResult, *, one: bool) -> bytes:
    rows = []
    for scores in result.values.tolist():
        named = [{"score": score, "label": label} for score, label in zip(scores, result.labels, strict=True)]
        rows.append(sorted(named, key=lambda each: -each["score"]))
    return dumps(rows[0] if one else rows)


def info(found: Sequence[pb.ModelMetadataResponse], parts: Mapping[str, str]) -> bytes:
    """Answer with what is known of the only model with a task; 404 without one, or with several."""
    models = [model for model in found if model.properties.get("task") in _TYPES]
    if len(models) != 1:
        raise HttpError(
            404, f"the server has {len(models)} models for texts, and /info describes the only one"
        )
    properties = models[0].properties
    labels = json.loads(properties.get("labels", "[]"))
    details: Mapping[str, Any] = {}
    if labels:
        details = {
            "id2label": {str(at): label for at, label in enumerate(labels)},
            "label2id": {label: at for at, label in enumerate(labels)},
        }
    return json_response(
        {
            "model_id": models[0].name,
            "model_sha": None,
            "model_dtype": "float32",
            "model_type": {_TYPES[properties["task"]]: details},
            "max_client_batch_size": min(MAX_TEXTS, int(properties.get("max_request_rows", 1))),
            "auto_truncate": True,
        }
    )
