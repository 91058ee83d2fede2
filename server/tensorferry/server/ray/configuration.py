"""Configuration of the Ray Serve application, from the arguments of its deployment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorferry.server.config.load import complete
from tensorferry.server.config.option import OptionScope
from tensorferry.server.config.server_config import OPTIONS, ServerConfig
from tensorferry.server.errors import ConfigError

_STANDALONE = {option.flag for option in OPTIONS if option.scope is OptionScope.STANDALONE}


def configuration(options: Mapping[str, Any]) -> ServerConfig:
    """Return the configuration of options with the keys of the TOML file, `models` and its tables included.

    ConfigError for an option that has no effect in a replica, and for a bad one.
    """
    values = dict(options)
    models = values.get("models", [])
    if isinstance(models, list):
        values["models"] = [str(model) for model in models]
    _refuse_standalone(values)
    for table in models.values() if isinstance(models, Mapping) else ():
        if isinstance(table, Mapping):
            _refuse_standalone(table)
    return complete((), {}, {}, values, "args")


def _refuse_standalone(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        flag = key.replace("_", "-")
        if flag in _STANDALONE or (flag == "model-control" and value != "none"):
            raise ConfigError(f"{key} is {value!r}, but it has no effect under Ray Serve: leave it out")
