"""Models of text: the copy of an encoder that ends in what its task answers with, and the check of a pipeline's task."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.models.remote.failures import AbsentError
from tensorferry.server.models.repository.fetched_sources import fetch_beside
from tensorferry.server.onnx.graph.model_file import UnreadableModel
from tensorferry.server.onnx.graph.rewriting.changes import NotFreed, read_changeable, write_changed
from tensorferry.server.onnx.graph.rewriting.text_head import (
    NoHead,
    add_head,
    has_pooled_output,
    unknown_pooling,
)
from tensorferry.server.signature import Signature, TensorSpec
from tensorferry.server.system.scratch_directory import ScratchDirectory
from tensorferry.serving import OnnxModel
from tensorferry.serving.text_tasks import (
    AUTO,
    CLASSIFY,
    EMBEDDING,
    FIRST,
    LAST,
    MEAN,
    RERANK,
    TOKEN_EMBEDDING,
    TOKEN_LIST,
    TOKENIZE,
    TextHead,
    TextTask,
)

_log = logging.getLogger("tensorferry.server")

# Where the package sentence-transformers says how vectors are pooled, and the modes that are supported.
_POOLING_FILE = "1_Pooling/config.json"
_MODES = {
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_cls_token": FIRST,
    "pooling_mode_lasttoken": LAST,
}
# The values of "pooling_mode", which newer versions write in place of one switch for each mode.
_MODE_NAMES = {"mean": MEAN, "cls": FIRST, "lasttoken": LAST}


def with_head(source: ModelSource, declared: OnnxModel, config: ServerConfig) -> ModelSource:
    """Return the source of a copy of an encoder, to which its declared head is added. StartError.

    `source` has the file's path. The copy is removed with the last reference to the returned source.
    """
    if declared.head is None:
        return source
    try:
        head = _resolved(declared.head, source.path, declared.address, config)
        folder = ScratchDirectory()
        copy = folder.path / source.path.name
        write_changed(source.path, partial(add_head, head=head), copy)
    except (NoHead, NotFreed, UnreadableModel) as error:
        raise StartError(f"model {source.name!r}: {source.path}: {error}") from error
    except OSError as error:
        raise StartError(
            f"model {source.name!r}: no copy of {source.path} could be written: {error}"
        ) from error
    _log.info(
        "model %s: %s is served from a copy, %s, that gives %s",
        source.name,
        source.path,
        copy,
        head.description,
    )
    return replace(source, path=copy, keep_alive=(source.keep_alive, folder))


def _resolved(head: TextHead, path: Path, address: str, config: ServerConfig) -> TextHead:
    """Return a head whose pooling is known. StartError for one that is not supported."""
    model = read_changeable(path)
    if head.pooling != AUTO:
        return head
    if has_pooled_output(model):
        return replace(head, pooling=None)
    if address:
        found = _fetched(address, config)
    else:
        folders = (path.parent, path.parent.parent)
        found = next((file for folder in folders if (file := folder / _POOLING_FILE).is_file()), None)
    if found is None:
        raise unknown_pooling(model)
    return replace(head, pooling=_pooling_in(found))


def _fetched(address: str, config: ServerConfig) -> Path | None:
    try:
        return fetch_beside(address, _POOLING_FILE, config)
    except AbsentError:
        return None


def _pooling_in(file: Path) -> str:
    try:
        given: Any = json.loads(file.read_bytes())
        chosen = [name for name, on in given.items() if name.startswith("pooling_mode_") and on is True]
    except (OSError, ValueError, AttributeError) as error:
        raise StartError(f"{file} cannot be read ({error}); declare `pooling`") from None
    modes = _MODES
    if (named := given.get("pooling_mode")) is not None:
        modes, chosen = _MODE_NAMES, [str(named)]
    if len(chosen) != 1 or chosen[0] not in modes:
        raise StartError(
            f"{file} says {', '.join(chosen) or 'nothing'}; supported is one of {', '.join(modes)}: add the pooling to the ONNX "
            "file, and declare pooling=None"
        )
    return modes[chosen[0]]


def check_task(name: str, task: TextTask, signature: Signature) -> None:
    """Raise StartError unless a model with this signature can do the task."""
    texts = [spec for spec in signature.inputs if _is(spec, "BYTES", 1) and not spec.binary]
    wanted = {RERANK: (2,), CLASSIFY: (1, 2)}.get(task.kind, (1,))
    if len(texts) != len(signature.inputs) or len(texts) not in wanted:
        raise StartError(
            f"model {name!r} has the task {task.kind!r}, which needs {' or '.join(map(str, wanted))} input(s) STRING[-1], but its "
            f"inputs are {', '.join(map(str, signature.inputs))}; a tokenizer must give all inputs of the encoder"
        )
    rank = {RERANK: 1, TOKEN_EMBEDDING: 3, TOKENIZE: 1}.get(task.kind, 2)
    datatype = "BYTES" if task.kind == TOKENIZE else "FP32"
    outputs = [spec for spec in signature.outputs if _is(spec, datatype, rank)]
    named = {RERANK: "score", CLASSIFY: "scores", TOKENIZE: TOKEN_LIST}.get(task.kind)
    fitting = [spec for spec in outputs if named in (None, spec.name)]
    masked = any(spec.name == "attention_mask" and _is(spec, "INT64", 2) for spec in signature.outputs)
    if len(fitting) != 1 or (task.kind == TOKEN_EMBEDDING and not masked):
        output = {
            EMBEDDING: "one output FP32[-1, size]",
            TOKEN_EMBEDDING: "one output FP32[-1, tokens, size] and the output attention_mask, INT64[-1, tokens]",
            RERANK: "an output score, FP32[-1]",
            CLASSIFY: "an output scores, FP32[-1, labels]",
            TOKENIZE: f"an output {TOKEN_LIST}, STRING[-1]",
        }[task.kind]
        raise StartError(
            f"model {name!r} has the task {task.kind!r}, which needs {output}, but its outputs are "
            f"{', '.join(map(str, signature.outputs))}"
        )
    classes = fitting[0].dims[-1]
    if task.kind == CLASSIFY and isinstance(classes, int) and classes != len(task.labels):
        raise StartError(
            f"model {name!r} has {len(task.labels)} labels, but its output has {classes} classes"
        )


def _is(spec: TensorSpec, datatype: str, rank: int) -> bool:
    return spec.datatype.name == datatype and not spec.any_rank and len(spec.dims) == rank
