"""Rerankers: /rerank in the dialects of Cohere and of Text Embeddings Inference, and /score as vLLM has it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tensorferry.server.transport.http.answers import dumps
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.json_values import Fields
from tensorferry.server.transport.http.text.openai import usage_of
from tensorferry.server.transport.http.text.tei import check_truncation
from tensorferry.server.transport.http.text.text_call import (
    TextCall,
    TextResult,
    check_texts,
    flag_in,
    number_in,
    texts_in,
)
from tensorferry.serving.text_tasks import RERANK

# Names of the two sides of the pairs in calls of /score.
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def rerank(fields: Fields) -> TextCall:
    """Parse a call of /rerank: with `texts` in the dialect of TEI, with `documents` in that of Cohere, Jina and vLLM."""
    query = fields.get("query")
    if not isinstance(query, str):
        raise HttpError(400, "'query' must be a string")
    if "documents" not in fields and "texts" not in fields:
        raise HttpError(
            400, "the request has neither 'documents', as Cohere has them, nor 'texts', as TEI has them"
        )
    if "texts" in fields:
        check_truncation(fields)
        texts = texts_in(fields, "texts")
        raw = flag_in(fields, "raw_scores")
        answer = partial(_as_tei, texts=texts if flag_in(fields, "return_text") else None)
        return TextCall(RERANK, _pairs([query], texts), answer, "logit" if raw else "score")
    texts = _documents(fields)
    returned = texts if flag_in(fields, "return_documents") else None
    cohere = partial(_as_cohere, texts=returned, most=number_in(fields, "top_n"))
    return TextCall(RERANK, _pairs([query], texts), cohere, "score")


def _documents(fields: Fields) -> Sequence[str]:
    given = fields["documents"]
    if not isinstance(given, list):
        raise HttpError(400, "'documents' must be a list of strings, or of objects with a string 'text'")
    texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in given]
    check_texts(texts, "documents")
    return texts


def _pairs(queries: Sequence[str], texts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    return (list(queries) * len(texts) if len(queries) == 1 else queries, texts)


def _as_tei(result: TextResult, *, texts: Sequence[str] | None) -> bytes:
    return dumps(
        [
            {"index": at, "score": score, **({} if texts is None else {"text": texts[at]})}
            for at, score in _best_first(result)
        ]
    )


def _as_cohere(result: TextResult, *, texts: Sequence[str] | None, most: int | None) -> bytes:
    results = [
        {
            "index": at,
            "relevance_score": score,
            **({} if texts is None else {"document": {"text": texts[at]}}),
        }
        for at, score in _best_first(result)[:most]
    ]
    return dumps(
        {
            "id": str(uuid.uuid4()),
            "model": result.model,
            "results": results,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
            "usage": usage_of(result.tokens),
        }
    )


def _best_first(result: TextResult) -> list[tuple[int, float]]:
    return sorted(enumerate(result.values.tolist()), key=lambda each: -each[1])


def score(fields: Fields) -> TextCall:
    """Parse a call of /score: of one text with each of others, or of as many pairs as each side has texts."""
    for names in _SIDES:
        if names[0] in fields and names[1] in fields:
            first, second = (texts_in(fields, name) for name in names)
            break
    else:
        raise HttpError(
            400, "the request must have 'text_1' and 'text_2', each a string or a list of strings"
        )
    if len(first) not in (1, len(second)):
        raise HttpError(
            400,
            f"{names[0]!r} has {len(first)} texts, but {names[1]!r} has {len(second)}; give one, or as many",
        )
    return TextCall(RERANK, _pairs(first, second), _scores, "score")


def _scores(result: TextResult) -> bytes:
    data: Sequence[Mapping[str, Any]] = [
        {"index": at, "object": "score", "score": score} for at, score in enumerate(result.values.tolist())
    ]
    return dumps(
        {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": result.model,
            "data": data,
            "usage": usage_of(result.tokens),
        }
    )
