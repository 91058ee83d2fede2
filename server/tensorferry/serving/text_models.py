"""Declarations of the models that the text endpoints of HTTP serve: embeddings, rerankers and classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tensorferry.serving.declarations import FunctionModel, OnnxModel, PipelineModel, Step, step
from tensorferry.serving.errors import DeclarationError
from tensorferry.serving.text_tasks import (
    AUTO,
    CLASSIFY,
    EMBEDDING,
    HEAD_OUTPUTS,
    POOLINGS,
    RERANK,
    TextHead,
    TextTask,
)


def embeddings(
    name: str,
    tokenizer: FunctionModel | Step,
    encoder: OnnxModel | Step,
    *,
    pooling: str | None = AUTO,
    normalize: bool = True,
    output: str = "",
    served_as: Sequence[str] = (),
) -> PipelineModel:
    """Declare a model that makes vectors of texts, for /v1/embeddings and /embed.

        embed = embeddings("embed", tokenizer(f"{HUB}/tokenizer.json"), onnx(f"{HUB}/onnx/model.onnx"), pooling="mean")

    `pooling` makes one vector of those of a text's tokens: "mean" of all, the "first" or the "last". None is for a file
    whose output is pooled. "auto" takes the file 1_Pooling/config.json of the encoder's repository or directory, and
    otherwise needs a pooled output. The wrong one gives bad vectors without an error. `normalize` scales vectors to
    length 1. Both are added to the encoder's graph, so that they run in its batches, on its device.

    `output` is the encoder's output that is read; by default the only one that fits. Clients of the endpoints
    can also ask for the model by the names `served_as`. Its outputs are `embedding`, FP32[-1, size], and `tokens`, INT64[-1], the tokens of each text.
    Raises DeclarationError.
    """
    if pooling not in (*POOLINGS, AUTO, None):
        raise DeclarationError(
            f"model {name!r}: pooling is {pooling!r}; it must be one of {', '.join(map(repr, POOLINGS))}, or None for a file "
            "whose output is pooled"
        )
    head = TextHead(EMBEDDING, pooling, normalize, output=output)
    task = TextTask(EMBEDDING, served_as=served_as, normalized=normalize)
    return _text_model(name, tokenizer, encoder, head, task)


def reranker(
    name: str,
    tokenizer: FunctionModel | Step,
    encoder: OnnxModel | Step,
    *,
    output: str = "",
    served_as: Sequence[str] = (),
) -> PipelineModel:
    """Declare a model that scores how well texts fit a query, for /rerank and /score.

        rank = reranker("rank", tokenizer("tokenizer.json", input=("query", "text")), onnx("model.onnx"))

    The tokenizer reads pairs. The encoder has one logit for each. The outputs are `score`, FP32[-1], its sigmoid; `logit`;
    and `tokens`, INT64[-1]. Other arguments are as in `embeddings`. Raises DeclarationError.
    """
    task = TextTask(RERANK, served_as=served_as)
    return _text_model(name, tokenizer, encoder, TextHead(RERANK, output=output), task)


def classifier(
    name: str,
    tokenizer: FunctionModel | Step,
    encoder: OnnxModel | Step,
    *,
    labels: Sequence[str],
    multi_label: bool = False,
    output: str = "",
    served_as: Sequence[str] = (),
) -> PipelineModel:
    """Declare a model that classifies texts, or pairs of texts, for /predict.

        mood = classifier("mood", tokenizer("tokenizer.json"), onnx("model.onnx"), labels=["negative", "positive"])

    The encoder has a logit for each of the `labels`. The outputs are `scores`, FP32[-1, labels]: their softmax, or with
    `multi_label` the sigmoid of each; `logits`; and `tokens`, INT64[-1]. Other arguments are as in `embeddings`. Raises
    DeclarationError.
    """
    task = TextTask(CLASSIFY, labels, served_as)
    head = TextHead(CLASSIFY, multi_label=multi_label or len(labels) == 1, output=output)
    return _text_model(name, tokenizer, encoder, head, task)


def _text_model(
    name: str, tokenizer: FunctionModel | Step, encoder: OnnxModel | Step, head: TextHead, task: TextTask
) -> PipelineModel:
    first = tokenizer if isinstance(tokenizer, Step) else step(tokenizer)
    last = encoder if isinstance(encoder, Step) else step(encoder)
    if not isinstance(first.model, FunctionModel) or not isinstance(last.model, OnnxModel):
        raise DeclarationError(
            f"model {name!r} has the steps {first.name!r} and {last.name!r}; the first must be a tokenizer, made by "
            "tokenizer(...), and the second an encoder, made by onnx(...)"
        )
    if last.outputs:
        raise DeclarationError(
            f"model {name!r} renames outputs of step {last.name!r}, which it replaces by others; leave `outputs` of the step out"
        )
    masks = [own for own, tensor in last.inputs.items() if tensor == "attention_mask"]
    head = replace(head, mask=masks[0] if masks else "attention_mask")
    names = {own: own.rpartition(".")[2] for own in HEAD_OUTPUTS[task.kind]}
    last = replace(last, model=replace(last.model, head=head), outputs=names)
    return PipelineModel(name, (first, last), tuple(names.values()), task)
