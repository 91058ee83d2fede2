"""Loading of the configuration from flags, environment variables and the file of `--config`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorferry.server.config.checks import check
from tensorferry.server.config.flags import nearest
from tensorferry.server.config.option import Option
from tensorferry.server.config.server_config import OPTIONS, ModelSource, ServerConfig
from tensorferry.server.errors import ConfigError
from tensorferry.server.names import NAME, NAME_RULE

# Kubernetes sets these variables in every pod if a Service is named tensorferry.
_SERVICE_LINKS = re.compile(r"TENSORFERRY_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP)\w*)")
# Variables of `tensorferry serve` and of the client's commands that are not options.
_OTHER_VARIABLES = ("TENSORFERRY_CONFIG", "TENSORFERRY_TOKEN")


def model_source(text: str) -> ModelSource:
    """Return the model in `path.onnx` or `name=path.onnx`; ConfigError if the name is not allowed."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name:
        name, path = Path(text).name.removesuffix(".onnx"), text
    if not path:
        raise ConfigError(f"MODEL is {text!r}; it must be path.onnx or name=path.onnx")
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"MODEL is {text!r}, and its name {name!r} is not allowed: {NAME_RULE}; choose one by name=path.onnx"
        )
    return ModelSource(name, Path(path))


def load_config(
    models: Sequence[str], flags: Mapping[str, str | None], environment: Mapping[str, str], file: Path | None
) -> ServerConfig:
    """Return the configuration. A flag has precedence over the environment, and the environment over the file.

    `models` are those of the command line; the file's list `models` is used if there are none.
    ConfigError describes the first bad value.
    """
    file_values = _read(file) if file is not None else {}
    models_in_file = file_values.pop("models", [])
    if not isinstance(models_in_file, list) or not all(isinstance(text, str) for text in models_in_file):
        raise ConfigError(
            f"models in {file} is {models_in_file!r}; it must be a list of path.onnx or name=path.onnx"
        )
    fields: dict[str, Any] = {}
    for option in OPTIONS:
        key = option.flag.replace("-", "_")
        in_file = [file_values.pop(name) for name in (option.flag, key) if name in file_values]
        if len(in_file) > 1:
            raise ConfigError(
                f"{file} has both {option.flag} and {key}, which are the same option; leave out one of them"
            )
        flag = flags.get(option.flag)
        if flag is not None:
            fields[option.field] = option.value(flag, f"--{option.flag}")
        elif option.variable in environment:
            fields[option.field] = option.value(environment[option.variable], option.variable)
        elif in_file:
            fields[option.field] = option.value(_text(in_file[0], option), f"{option.flag} in {file}")
    for key in file_values:
        near = nearest(key.replace("_", "-"), ["models", *(option.flag for option in OPTIONS)])
        advice = f"; did you mean {near}?" if near else "; tensorferry serve --help shows all options"
        raise ConfigError(f"{file} has the unknown key {key!r}{advice}")
    config = ServerConfig(tuple(model_source(text) for text in models or models_in_file), **fields)
    check(config)
    return config


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


def _text(value: Any, option: Option) -> str:
    if option.separator and isinstance(value, list):
        return option.separator.join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config is {str(file)!r}; it must be a readable TOML file ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config is {str(file)!r}, which is not valid TOML: {error}") from None
