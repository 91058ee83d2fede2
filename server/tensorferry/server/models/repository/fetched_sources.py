"""Models and repositories elsewhere that the options or Python files name, fetched into the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import ConfigError, StartError
from tensorferry.server.models.remote.cache import default_cache
from tensorferry.server.models.remote.model_files import FetchedModel, ModelFiles
from tensorferry.server.models.remote.repository_mirror import RepositoryMirror
from tensorferry.server.models.remote.stores import stores
from tensorferry.server.models.remote.url import RemoteUrl, parse_file
from tensorferry.server.models.repository.repository import Repository
from tensorferry.server.onnx.graph import external_files
from tensorferry.serving import FunctionModel, OnnxModel


def fetched_sources(sources: Sequence[ModelSource], config: ServerConfig) -> Sequence[ModelSource]:
    """Return the sources, with the path in the cache of those that are elsewhere. StartError for the first that fails."""
    found = []
    for source in sources:
        if source.origin is not None:
            fetched = _model_files(config).fetch(source.origin)
            source = replace(source, path=fetched.path, keep_alive=fetched.tree)
        found.append(source)
    return found


def fetch_declared(declared: OnnxModel, config: ServerConfig) -> FetchedModel:
    """Return the file of an ONNX model that a Python file declares by its address. StartError."""
    return _model_files(config).fetch(_parsed(declared.address, declared.name))


def fetch_beside(address: str, name: str, config: ServerConfig) -> Path | None:
    """Return a file of the repository that a file's address is in; None if it has none, or hashes of files are pinned.

    Raises AbsentError if the repository has no such file, and StartError.
    """
    url = _parsed(address, name)
    if url.scheme != "hf" or url.pins:
        return None
    beside = replace(url, path=name, text="")
    return _model_files(config, of_onnx=False).fetch(beside).path


def fetched_function(declared: FunctionModel, config: ServerConfig) -> tuple[FunctionModel, object]:
    """Return a function whose file is fetched, and what keeps the copy while it is referred to. StartError."""
    elsewhere = declared.elsewhere
    if elsewhere is None:
        return declared, None
    fetched = _model_files(config, of_onnx=False).fetch(_parsed(elsewhere.address, declared.name))
    return elsewhere.declare(fetched.path), fetched.tree


def _parsed(address: str, name: str) -> RemoteUrl:
    try:
        return parse_file(address)
    except ConfigError as error:
        raise StartError(f"model {name!r}: {error}") from None


def _model_files(config: ServerConfig, *, of_onnx: bool = True) -> ModelFiles:
    return ModelFiles(
        _cache(config),
        stores(allow_http=config.allow_http),
        external_files if of_onnx else lambda path: (),
    )


def open_repository(config: ServerConfig) -> Repository:
    """Return the model repositories of the options. Those elsewhere are listed when it is refreshed."""
    store_of = stores(allow_http=config.allow_http)
    return Repository(
        [
            RepositoryMirror(root, _cache(config), store_of, allow_code=config.allow_remote_code)
            if isinstance(root, RemoteUrl)
            else root
            for root in config.model_repositories
        ]
    )


def _cache(config: ServerConfig) -> Path:
    return config.model_cache or default_cache()
