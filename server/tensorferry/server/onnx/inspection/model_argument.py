"""Models that an argument MODEL of a command names: found with the options of a server, and loaded without being served."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from tensorferry.server.config.directory_advice import advice_for, models_in_directory
from tensorferry.server.config.load import load_config, model_source, models_in
from tensorferry.server.config.option import Option
from tensorferry.server.config.server_config import OPTIONS, PYTHON_SUFFIX, ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.models.repository.repository import Repository
from tensorferry.server.runtime.devices import choose_device

MODEL_HELP = (
    "path.onnx, name=path.onnx, path.py, an address such as s3://BUCKET/model.onnx, the name of a model in the file of --config, or the directory of a model, with "
    "NAME/VERSION/model.onnx and optionally NAME/config.pbtxt; the highest version that would be served is read"
)

# The options that a model's configuration depends on, and those of the log.
_FIELDS = frozenset((
    "model_cache", "allow_http", "custom_ops", "device", "cuda_memory_bytes", "tf32", "fp16", "fp16_tolerance",
    "instances", "threads", "providers", "max_batch_size", "batching", "batching_rewrite", "max_queue_delay",
    "preferred_batch_sizes", "priority_weights", "default_priority", "run_timeout", "log_format", "log_level",
))  # fmt: skip
MODEL_OPTIONS: Sequence[Option] = [option for option in OPTIONS if option.field in _FIELDS]


def find_model(
    model: str, flags: Mapping[str, str | None], file: Path | None
) -> tuple[ModelSource, ServerConfig]:
    """Return the model that a MODEL names, and its configuration. ConfigError or StartError names what is wrong.

    `flags` are those of the command line, `file` that of --config. A model elsewhere is not fetched yet.
    """
    # Not Path.is_dir, which raises if this process may not enter a directory above.
    if os.path.isdir(model):
        source = source_in(Path(model))
    else:
        in_file = () if file is None else models_in(file)
        source = next((named for named in in_file if named.name == model), None) or model_source(model)
        try:
            # A file that does not exist is reported by the load.
            with suppress(FileNotFoundError):
                source.path.stat()
        except OSError as error:
            raise StartError(f"{source.path} cannot be read: {error}") from None
    # A Python file names its models itself. Its path is absolute, because "a=b/app.py" would be a name and a file.
    named = (
        os.path.abspath(source.path)
        if source.path.suffix == PYTHON_SUFFIX
        else f"{source.name}={source.path}"
    )
    if source.origin is not None:
        named = f"{source.name}={source.origin.text}"
    config = load_config([named], flags, os.environ, file)
    return source, config.for_model(source.name)


def models_of_repository(directory: Path) -> Sequence[str]:
    """Return the directories of a model repository's models; none if the directory is no repository, or is a model."""
    if not os.path.isdir(directory) or not models_in_directory(directory):
        return []
    return [str(directory / name) for name in Repository([directory]).names()]


def source_in(directory: Path) -> ModelSource:
    """Return the highest served version in a model's directory; StartError if there is none."""
    home = Path(os.path.abspath(directory))
    try:
        versions = Repository([home.parent]).versions(home.name)
    except StartError:
        if advice := advice_for(directory):
            raise StartError(f"{directory} is no model: {advice}") from None
        raise
    if not versions:
        raise StartError(f"{directory} is named {home.name!r}, which is not a valid model name: rename it")
    return versions[-1].source


def loaded_models(
    sources: Sequence[ModelSource], config: ServerConfig
) -> Iterator[tuple[ModelSource, Model]]:
    """Load models and yield each. A model may use those before it. All are closed at the end of the iteration.

    StartError if one cannot be loaded.
    """
    registry = ModelRegistry()
    devices = {config.device: choose_device(config.device)}
    context = LoadContext(config, devices, registry=registry)
    with ExitStack() as loaded:
        for source in sources:
            model = load_model(source, context)
            loaded.callback(model.release)
            loaded.callback(model.batcher.close)
            registry.mark_ready(model)
            yield source, model
