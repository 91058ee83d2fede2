"""`tensorferry config`: the completed configuration of a model, in text format."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.flags import CommandParser, add_flags, config_file, read_flags
from tensorferry.server.config.server_config import PYTHON_SUFFIX, ModelSource, ServerConfig
from tensorferry.server.errors import ConfigError, StartError
from tensorferry.server.models.config_pbtxt.ensembles import complete_ensemble, is_ensemble, named_models
from tensorferry.server.models.config_pbtxt.pbtxt import config_text
from tensorferry.server.models.config_pbtxt.supported_fields import ModelKind, check_fields
from tensorferry.server.models.repository.declared_sources import declared_source, declared_sources
from tensorferry.server.models.repository.fetched_sources import fetched_sources
from tensorferry.server.names import printable, printable_lines
from tensorferry.server.observability.logs import logs
from tensorferry.server.onnx.inspection.model_argument import (
    MODEL_HELP,
    MODEL_OPTIONS,
    find_model,
    loaded_models,
    models_of_repository,
)
from tensorferry.server.onnx.loading.preparation import prepare_model
from tensorferry.server.runtime.devices import choose_device

_log = logging.getLogger("tensorferry.server")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tensorferry config",
        usage="tensorferry config MODEL|REPOSITORY [--FLAG VALUE ...]",
        description="Print the completed configuration of a model, as ModelConfig returns it: its config.pbtxt, if it has one, "
        "completed from the ONNX file and the options, with those of its table in the file of --config. The first line, a "
        "comment, describes how the model is batched and whether that is proved, tested or trusted. Of a Python file, each "
        "model is printed; of a model repository, each model, and an error for each that cannot be served. Nothing is served.",
        epilog="The options are those of tensorferry serve; environment variables work, too.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_flags(parser, MODEL_OPTIONS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Return 0 if the configuration is printed, 1 if a model cannot be served, 2 for bad options."""
    arguments, flags = read_flags(_parser(), argv, MODEL_OPTIONS)
    # The configuration goes to stdout; the log is limited to warnings, so that they are not lost among other lines.
    if "TENSORFERRY_LOG_LEVEL" not in os.environ:
        flags["log-level"] = flags["log-level"] or "warning"
    file = config_file(arguments)
    models = models_of_repository(Path(arguments["model"])) or [arguments["model"]]
    return max(_show(model, flags, file, first=model == models[0]) for model in models)


def _show(model: str, flags: Mapping[str, str | None], file: Path | None, *, first: bool) -> int:
    try:
        source, server_config = find_model(model, flags, file)
        logs.configure(server_config.log_format, server_config.log_level)
        completed = list(_completed(source, server_config))
    except ConfigError as error:
        print(printable_lines(f"tensorferry config: {error}"), file=sys.stderr)
        return 2
    except StartError as error:
        print(printable_lines(f"tensorferry config: {error}"), file=sys.stderr)
        return 1
    for number, (description, config) in enumerate(completed):
        # A comment, so that the output is a valid config.pbtxt.
        print(f"{'' if first and not number else chr(10)}# {printable(description)}")
        print(config_text(config), end="")
    return 0


def _completed(source: ModelSource, server_config: ServerConfig) -> Iterator[tuple[str, ModelConfig]]:
    """Yield a description of how a model is batched, and its completed configuration; for all models of a Python file."""
    (source,) = fetched_sources([source], server_config)
    if source.config is not None and is_ensemble(source.config):
        for warning in check_fields(source.config, source.name, ModelKind.ENSEMBLE):
            _log.warning("%s", warning)
        config = complete_ensemble(source.config, source.name)
        names = ", ".join(dict.fromkeys(named.name for named in named_models(config)))
        yield f"an ensemble of {names}, with whose configurations a server compares it", config
    elif source.path.suffix == PYTHON_SUFFIX:
        sources = declared_sources([source]) if source.directory is None else [declared_source(source)]
        yield from _loaded(sources, server_config)
    elif server_config.state or (source.config is not None and source.config.HasField("sequence_batching")):
        # Loaded, because that finds the tensors that clients do not see.
        yield from _loaded([source], server_config)
    else:
        with ExitStack() as scratch:
            prepared = prepare_model(source, server_config, choose_device(server_config.device), scratch)
        yield prepared.batching.description, prepared.config


def _loaded(sources: Sequence[ModelSource], server_config: ServerConfig) -> Iterator[tuple[str, ModelConfig]]:
    for _, model in loaded_models(sources, server_config):
        yield model.batching, model.config
