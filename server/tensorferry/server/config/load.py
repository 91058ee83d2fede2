"""Flags, environment and file → one frozen configuration, validated with the offending value."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorferry.server.config.device_options import cuda_flags, fp16_flags
from tensorferry.server.config.flags import nearest
from tensorferry.server.config.limit_options import check_limits
from tensorferry.server.config.option_types import Option
from tensorferry.server.config.options import OPTIONS
from tensorferry.server.config.security_options import check_security
from tensorferry.server.config.server_config import ConfigError, ModelSource, ServerConfig
from tensorferry.server.names import NAME


def model_source(text: str) -> ModelSource:
    """The model in `path.onnx` or `name=path.onnx`; ConfigError when the name is not allowed."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name:
        name, path = Path(text).name.removesuffix(".onnx"), text
    if not path:
        raise ConfigError(f"MODEL is {text!r}; it must be path.onnx or name=path.onnx")
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"MODEL is {text!r}, whose name is {name!r}; a name starts with a letter or digit, goes on with these and "
            "'.', '_', '-', and has at most 128 characters: give it one by name=path.onnx"
        )
    return ModelSource(name, Path(path))


def load_config(
    models: Sequence[str], flags: Mapping[str, str | None], environment: Mapping[str, str], file: Path | None
) -> ServerConfig:
    """The configuration; a flag counts before the environment, that before the file.

    `models` are the command line's; if there are none, the file's list `models` is taken.
    ConfigError for the first bad value.
    """
    in_file = _read(file) if file is not None else {}
    listed = in_file.pop("models", [])
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise ConfigError(f"models in {file} is {listed!r}; it must be a list of path.onnx or name=path.onnx")
    fields: dict[str, Any] = {}
    for option in OPTIONS:
        key = option.flag.replace("-", "_")
        from_file = [in_file.pop(name) for name in (option.flag, key) if name in in_file]
        if len(from_file) > 1:
            raise ConfigError(
                f"{file} has both {option.flag} and {key}, which are one; leave out one of them"
            )
        flag = flags.get(option.flag)
        if flag is not None:
            fields[option.field] = option.value(flag, f"--{option.flag}")
        elif option.variable in environment:
            fields[option.field] = option.value(environment[option.variable], option.variable)
        elif from_file:
            fields[option.field] = option.value(_text(from_file[0], option), f"{option.flag} in {file}")
    if in_file:
        key = next(iter(in_file))
        near = nearest(key.replace("_", "-"), ["models", *(option.flag for option in OPTIONS)])
        meant = f"; did you mean {near}?" if near else "; tensorferry serve --help shows all options"
        raise ConfigError(f"{file} has the unknown key {key!r}{meant}")
    sources = tuple(model_source(text) for text in models or listed)
    if not sources and not fields.get("model_repositories"):
        raise ConfigError(
            "no MODEL was given; name at least one: tensorferry serve path.onnx, or --model-repository DIR"
        )
    config = ServerConfig(sources, **fields)
    if config.default_priority > len(config.priority_weights):
        raise ConfigError(
            f"default-priority is {config.default_priority}, but priority-weights has {len(config.priority_weights)} "
            "classes: choose one of these"
        )
    for size in config.preferred_batch_sizes:
        if size > config.max_batch_size:
            raise ConfigError(
                f"preferred-batch-sizes has {size}, but max-batch-size is {config.max_batch_size}: choose sizes up to that"
            )
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models are named {name!r}; give one another name by name=path.onnx")
    _check_control(config)
    check_security(config)
    check_limits(config)
    _check_device(config)
    if config.pad_lengths is None and config.pad_values:
        raise ConfigError(
            "pad-values are given without pad-lengths; say what is padded: --pad-lengths AXIS=16,32,64"
        )
    if config.pad_lengths is not None and config.max_batch_size == 0:
        raise ConfigError(
            "pad-lengths are given, but max-batch-size is 0: nothing shares a batch; leave out one of them"
        )
    return config


# Kubernetes sets these in every pod for a Service of that name.
_SERVICE_LINKS = re.compile(r"TENSORFERRY_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP)\w*)")
# Of this command and of the client's.
_OTHER_VARIABLES = ("TENSORFERRY_CONFIG", "TENSORFERRY_TOKEN")


def unknown_variables(environment: Mapping[str, str]) -> Sequence[str]:
    """A warning for each variable that looks like an option and is none."""
    known = [*(option.variable for option in OPTIONS), *_OTHER_VARIABLES]
    warnings = []
    for name in sorted(environment):
        if name.startswith("TENSORFERRY_") and name not in known and not _SERVICE_LINKS.fullmatch(name):
            near = nearest(name, known)
            meant = f"; did you mean {near}?" if near else ""
            warnings.append(f"the environment has {name}, which is no option and changes nothing{meant}")
    return warnings


def _check_control(config: ServerConfig) -> None:
    if config.model_control != "none" and not config.model_repositories:
        raise ConfigError(
            f"model-control is {config.model_control!r}, but there is no model repository to control: name one by "
            "--model-repository"
        )
    if config.load_models and config.model_control != "explicit":
        raise ConfigError(
            f"load-model is {','.join(config.load_models)!r}, but model-control is {config.model_control!r}, by which "
            "every model of the repository is loaded; leave it out, or give --model-control explicit"
        )


def _check_device(config: ServerConfig) -> None:
    if config.device == "cpu":
        for given in cuda_flags(config):
            raise ConfigError(
                f"{given}, but device is 'cpu', where it changes nothing; leave out one of them"
            )
    # A model of a repository may ask for FP16 itself.
    if not config.fp16 and not config.model_repositories:
        for given in fp16_flags(config):
            raise ConfigError(f"{given}, but no model is converted to FP16; give --fp16, or leave it out")


def _text(value: Any, option: Option) -> str:
    if option.separator and isinstance(value, list):
        return option.separator.join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--config is {str(file)!r}; it must be a TOML file that can be read ({error})"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config is {str(file)!r}, which is not valid TOML: {error}") from None
