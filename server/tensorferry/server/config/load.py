"""Loading of the configuration from flags, environment variables and the file of `--config`."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorferry.server.config.checks import check
from tensorferry.server.config.directory_advice import advice_for
from tensorferry.server.config.flags import CONFIG_VARIABLE, REPLACED, nearest, refuse_replaced
from tensorferry.server.config.model_tables import read_table
from tensorferry.server.config.option import variable_of
from tensorferry.server.config.server_config import OPTIONS, PYTHON_SUFFIX, ModelSource, ServerConfig
from tensorferry.server.errors import ConfigError
from tensorferry.server.models.remote.url import is_remote, parse_file
from tensorferry.server.names import NAME, NAME_RULE

# Kubernetes sets these variables in every pod if a Service is named tensorferry.
_SERVICE_LINKS = re.compile(r"TENSORFERRY_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP)\w*)")
# Variables of `tensorferry serve` and of the client's commands that are not options.
_OTHER_VARIABLES = (CONFIG_VARIABLE, "TENSORFERRY_TARGET", "TENSORFERRY_TOKEN")


def model_source(text: str) -> ModelSource:
    """Return the model in `path.onnx` or `name=path.onnx`; ConfigError if the name is not allowed.

    In place of the path there can be an address elsewhere. A file `path.py` declares models, whose names are known when it
    is imported. Its own name is its path.
    """
    if is_remote(text):
        return _remote_source(None, text)
    if "\0" in text:
        raise ConfigError(
            f"MODEL is {text!r}; it must be path.onnx, name=path.onnx or path.py, without a NUL character"
        )
    name, equals, path = text.partition("=")
    if is_remote(path) and "/" not in name:
        return _remote_source(name, path)
    if path.endswith(PYTHON_SUFFIX) and "/" not in name:
        raise ConfigError(f"MODEL is {text!r}; a Python file names its models itself: give {path} alone")
    if text.endswith(PYTHON_SUFFIX):
        return ModelSource(text, Path(text))
    if not equals or "/" in name:
        name, path = Path(text).name.removesuffix(".onnx"), text
    if not path:
        raise ConfigError(f"MODEL is {text!r}; it must be path.onnx, name=path.onnx or path.py")
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"MODEL is {text!r}, and its name {name!r} is not allowed: {NAME_RULE}; choose one by name=path.onnx"
        )
    # Not Path.is_dir, which raises if this process may not enter a directory above.
    if os.path.isdir(path):
        advice = advice_for(Path(path), serves=True)
        raise ConfigError(
            f"MODEL is {text!r}, a directory{f': {advice}' if advice else '; give path.onnx or path.py'}"
        )
    return ModelSource(name, Path(path))


def _remote_source(name: str | None, address: str) -> ModelSource:
    """Return a model elsewhere. Its name is that of its file unless one is given."""
    url = parse_file(address)
    name = url.model_name if name is None else name
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"MODEL is {url}, and its name {name!r} is not allowed: {NAME_RULE}; choose one by name={url.scheme}://..."
        )
    return ModelSource(name, Path(url.file_name), origin=url)


def load_config(
    models: Sequence[str], flags: Mapping[str, str | None], environment: Mapping[str, str], file: Path | None
) -> ServerConfig:
    """Return the configuration. A flag has precedence over the environment, and the environment over the file.

    `models` are those of the command line; those of the file are used if there are none. The file's tables of single
    models hold for all models with their names.
    ConfigError describes the first bad value.
    """
    values = _read(file) if file is not None else {}
    return complete(models, flags, environment, values, str(file))


def models_in(file: Path) -> Sequence[ModelSource]:
    """Return the models that a file of --config serves."""
    sources, _ = _read_models(_read(file).get("models", []), str(file))
    return sources


def complete(
    models: Sequence[str],
    flags: Mapping[str, str | None],
    environment: Mapping[str, str],
    in_file: Mapping[str, Any],
    place: str,
) -> ServerConfig:
    """Return the configuration, as `load_config` does. `place` names the source of the values `in_file` in errors."""
    values = dict(in_file)
    for replaced, other in REPLACED.items():
        if variable_of(replaced) in environment:
            raise ConfigError(f"{variable_of(replaced)} is replaced by {other}")
    refuse_replaced(values, place)
    sources, model_options = _read_models(values.pop("models", []), place)
    fields: dict[str, Any] = {}
    for option in OPTIONS:
        text = option.take(values, place)
        flag = flags.get(option.flag)
        if flag is not None:
            fields[option.field] = option.value(flag, f"--{option.flag}")
        elif option.variable in environment:
            fields[option.field] = option.value(environment[option.variable], option.variable)
        elif text is not None:
            fields[option.field] = option.value(text, f"{option.flag} in {place}")
    for key in values:
        near = nearest(key.replace("_", "-"), ["models", *(option.flag for option in OPTIONS)])
        advice = f"; did you mean {near}?" if near else "; tensorferry serve --help shows all options"
        raise ConfigError(f"{place} has the unknown key {key!r}{advice}")
    named = tuple(map(model_source, models))
    config = ServerConfig(named or sources, model_options=model_options, **fields)
    check(config)
    return config


def _read_models(models: Any, place: str) -> tuple[tuple[ModelSource, ...], Mapping[str, Mapping[str, Any]]]:
    """Return the models that a file serves, and the options of single models. The value is a list, or has tables."""
    if isinstance(models, dict):
        tables = {name: read_table(name, table, place) for name, table in models.items()}
        sources = [
            _table_source(name, table.path) for name, table in tables.items() if table.path is not None
        ]
        return tuple(sources), {name: table.options for name, table in tables.items()}
    if not isinstance(models, list) or not all(isinstance(text, str) for text in models):
        raise ConfigError(
            f"models in {place} is {models!r}; it must be a list of path.onnx or name=path.onnx, or a table "
            "[models.NAME] for each model"
        )
    return tuple(map(model_source, models)), {}


def _table_source(name: str, path: str) -> ModelSource:
    return _remote_source(name, path) if is_remote(path) else ModelSource(name, Path(path))


def unknown_variables(environment: Mapping[str, str]) -> Sequence[str]:
    """Return a warning for each variable that is named like an option but is none."""
    known = [*(option.variable for option in OPTIONS), *_OTHER_VARIABLES]
    warnings = []
    for name in sorted(environment):
        if name.startswith("TENSORFERRY_") and name not in known and not _SERVICE_LINKS.fullmatch(name):
            near = nearest(name, known)
            advice = f"; did you mean {near}?" if near else ""
            warnings.append(f"the environment variable {name} is not an option and has no effect{advice}")
    return warnings


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config is {str(file)!r}; it must be a readable TOML file ({error})") from None
    except tomllib.TOMLDecodeError as error:
        if "Cannot declare ('models'" in str(error):
            raise ConfigError(
                f"--config is {str(file)!r}, which has both models = [...] and tables [models.NAME]; give each model a table with "
                "its path, or name the models on the command line"
            ) from None
        raise ConfigError(f"--config is {str(file)!r}, which is not valid TOML: {error}") from None
