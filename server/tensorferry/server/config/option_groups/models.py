"""Options of models: where they come from, and when they are loaded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tensorferry.server.config.option import OptionScope, option
from tensorferry.server.config.parsers import Parser, one_of, parse_path, path, positive_seconds, switch
from tensorferry.server.models.remote.url import RemoteUrl, is_remote, parse_repository
from tensorferry.server.names import NAME


def _parse_paths(text: str) -> tuple[Path, ...]:
    return tuple(map(parse_path, text.split(os.pathsep)))


def _parse_repositories(text: str) -> tuple[Path | RemoteUrl, ...]:
    # A separator before "//" belongs to an address.
    parts = re.split(rf"{re.escape(os.pathsep)}(?!//)", text)
    return tuple(parse_repository(part) if is_remote(part) else parse_path(part) for part in parts)


def _parse_model_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if names != ("*",) and not all(map(NAME.fullmatch, names)):
        raise ValueError
    return names


def _parse_encoders(text: str) -> tuple[str, ...]:
    if not all(parts := text.split(",")) or "\0" in text:
        raise ValueError
    return tuple(parts)


_repositories = Parser(
    _parse_repositories,
    f"directories or addresses such as s3://BUCKET/PREFIX, separated by {os.pathsep!r}",
    "list of paths",
    "DIR|URL",
)
_libraries = Parser(
    lambda text: tuple(map(str, _parse_paths(text))),
    f"paths of shared libraries or onnxruntime-extensions, separated by {os.pathsep!r}",
    "list of paths",
    "FILE|onnxruntime-extensions",
)
_embeddings = Parser(
    _parse_encoders,
    "directories with an ONNX file and tokenizer.json, or addresses such as hf://ORG/REPO, separated by commas",
    "list of paths",
    "[NAME=]DIR|hf://ORG/REPO",
)
_model_names = Parser(
    _parse_model_names, "names of models, separated by commas, or *", "list of names", "NAME|*"
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of models."""

    model_repositories: tuple[Path | RemoteUrl, ...] = option(
        (),
        _repositories,
        "directory of models in Triton's layout, NAME/VERSION/model.onnx, or the address of one: s3://BUCKET/PREFIX, "
        "gs://BUCKET/PREFIX, hf://ORG/REPO; can be given several times",
        flag="model-repository",
        separator=os.pathsep,
    )
    embeddings: tuple[str, ...] = option(
        (),
        _embeddings,
        "encoder of texts, with its tokenizer.json and its pooling, for /v1/embeddings of --http-port: a directory, or "
        "hf://ORG/REPO; can be given several times",
        separator=",",
    )
    model_control: str = option(
        "none",
        one_of("none", "poll", "explicit"),
        "how the models of the repository change; none: they stay as they are at start; poll: the server follows changes "
        "of the files; explicit: clients load and unload models",
    )
    load_models: tuple[str, ...] = option(
        (),
        _model_names,
        "with --model-control explicit: model of the repository to load at start, * for all; can be given several times",
        flag="load-model",
        separator=",",
    )
    repository_poll_seconds: float = option(
        15.0, positive_seconds, "with --model-control poll: time between two scans of the repository"
    )
    model_cache: Path | None = option(
        None,
        path,
        "directory for models that are fetched from elsewhere; without it tensorferry/models in XDG_CACHE_HOME, or in ~/.cache",
    )
    allow_http: bool = option(
        False, switch, "allow models from http:// addresses, which the network can read and replace"
    )
    allow_remote_code: bool = option(
        False,
        switch,
        "fetch Python files and shared libraries of repositories elsewhere, too: all people with write access there can then run code "
        "in the server",
    )
    exit_on_error: bool = option(True, switch, "exit if a model of the repository cannot be loaded at start")
    custom_ops: tuple[str, ...] = option(
        (),
        _libraries,
        "shared library (.so) of custom operators, or onnxruntime-extensions for the operators of that package; can be given "
        "several times",
        separator=os.pathsep,
        per_model=True,
    )
    reload: bool = option(
        False,
        switch,
        "for development: start the server again when a Python file, a model or the file of --config changes",
        scope=OptionScope.STANDALONE,
    )
