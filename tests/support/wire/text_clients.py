"""Clients of the text endpoints against a server, with a JSON report; test_text_clients.py runs it in an environment of theirs.

The argument is the server's URL.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import cohere
import openai
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from langchain_openai import OpenAIEmbeddings

TEXTS = ["a man is eating", "the woman is riding a horse", "my food"]
CONCURRENT = 64
ALIAS = "text-embedding-3-small"


def of_openai(url: str) -> dict[str, Any]:
    """Return what OpenAI's client gets."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        def vectors(**more: Any) -> Any:
            answer = client.embeddings.create(model=ALIAS, input=TEXTS, **more)
            return [each.embedding for each in answer.data]

        def failure(**arguments: Any) -> list[Any]:
            try:
                client.embeddings.create(**arguments)
            except openai.APIStatusError as error:
                return [type(error).__name__, error.message]
            return []

        answer = client.embeddings.create(model="embed", input=TEXTS[0])
        return {
            "default": vectors(),
            "float": vectors(encoding_format="float"),
            "short": vectors(dimensions=2),
            "one": answer.data[0].embedding,
            "model": answer.model,
            "tokens": answer.usage.prompt_tokens,
            "models": [each.id for each in client.models.list()],
            "retrieved": client.models.retrieve(ALIAS).id,
            "errors": [
                failure(model="nobody", input="a"),
                failure(model="embed", input=[]),
                failure(model="embed", input=[[1, 2]]),
                failure(model="rank", input="a"),
            ],
            "concurrent": asyncio.run(_at_once(url)),
        }


async def _at_once(url: str) -> list[int]:
    """Return the tokens of many calls at once, each of one text more than the one before."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(client.embeddings.create(model="embed", input=["food"] * (1 + at)) for at in range(CONCURRENT))
        )
    return [len(answer.data) for answer in answers]


def of_langchain(url: str) -> dict[str, Any]:
    """Return what LangChain's embeddings get."""
    given: dict[str, Any] = {"model": ALIAS, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    # Without the flag, it sends ids of another tokenizer, which it fetches.
    client = OpenAIEmbeddings(**given, check_embedding_ctx_length=False)
    return {"documents": client.embed_documents(TEXTS), "query": client.embed_query(TEXTS[0])}


def of_cohere(url: str) -> list[list[Any]]:
    """Return the ranks that Cohere's client gets, by both versions of its protocol."""
    return [
        [
            [each.index, each.relevance_score]
            for each in client.rerank(model="rank", query=TEXTS[2], documents=TEXTS).results
        ]
        for client in (cohere.Client("none", base_url=url), cohere.ClientV2("none", base_url=url))
    ]


def of_hugging_face(url: str) -> dict[str, Any]:
    """Return what Hugging Face's client gets, which speaks to Text Embeddings Inference and sends to its URL alone."""
    client = InferenceClient(base_url=f"{url}/models/embed")
    try:
        client.feature_extraction([])
    except HfHubHTTPError as error:
        failure = error.response.status_code
    else:
        failure = 200
    return {"embed": client.feature_extraction(TEXTS).tolist(), "failure": failure}


def main() -> None:
    """Print the report."""
    url = sys.argv[1]
    report = {
        "openai": of_openai(url),
        "langchain": of_langchain(url),
        "cohere": of_cohere(url),
        "hugging_face": of_hugging_face(url),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
