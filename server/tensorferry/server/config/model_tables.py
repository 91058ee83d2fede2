"""Tables `[models.NAME]` of the file of `--config`: the options of one model, and optionally its path."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorferry.server.config.flags import nearest, refuse_replaced
from tensorferry.server.config.server_config import OPTIONS, ServerConfig
from tensorferry.server.errors import ConfigError
from tensorferry.server.names import NAME, NAME_RULE

_PATH = "path"
_MODEL_OPTIONS = tuple(option for option in OPTIONS if option.per_model)


@dataclass(frozen=True, slots=True)
class ModelTable:
    """A model's table: the path or address of the model to serve, None if it names none, and its options by field."""

    path: str | None
    options: Mapping[str, Any]


def table_name(model: str) -> str:
    """Return the header line of a model's table in the file."""
    return f"[models.{model}]" if re.fullmatch(r"[\w-]+", model) else f'[models."{model}"]'


def unserved_tables(config: ServerConfig, served: Sequence[str]) -> Sequence[str]:
    """Return a warning for each table of a model that is not among the names of the served models."""
    warnings = []
    for name in config.model_options:
        if name not in served:
            near = nearest(name, served)
            advice = f"; did you mean {table_name(near)}?" if near else ""
            warnings.append(f"{table_name(name)} has no effect: no model of that name is served{advice}")
    return warnings


def read_table(name: str, given: Any, place: str) -> ModelTable:
    """Return a table of a file. ConfigError describes what is wrong, and names the place."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{place} has the table {table_name(name)}, whose name is not allowed: {NAME_RULE}")
    if not isinstance(given, dict):
        raise ConfigError(
            f"models.{name} in {place} is {given!r}; it must be a table of the model's options: {table_name(name)}"
        )
    where = f"{table_name(name)} of {place}"
    values = dict(given)
    path = values.pop(_PATH, None)
    if path is not None and (not isinstance(path, str) or not path.strip() or "\0" in path):
        raise ConfigError(
            f"{_PATH} in {where} is {path!r}; it must be the path or address of a model, such as 'model.onnx'"
        )
    refuse_replaced(values, where)
    options = {}
    for option in _MODEL_OPTIONS:
        text = option.take(values, where)
        if text is not None:
            options[option.field] = option.value(text, f"{option.flag} in {where}")
    for key, value in values.items():
        raise ConfigError(_wrong_key(name, key, value, where))
    return ModelTable(path, options)


def _wrong_key(name: str, key: str, value: Any, where: str) -> str:
    known = [_PATH, *(option.flag for option in _MODEL_OPTIONS)]
    flag = key.replace("_", "-")
    near = nearest(flag, known)
    advice = f"; did you mean {near}?" if near else f"; it can have {', '.join(known)}"
    if any(option.flag == flag for option in OPTIONS):
        return (
            f"{where} has {key!r}, which is an option of the whole server, not of one model: give it above all "
            f"tables{advice}"
        )
    if isinstance(value, dict):
        return f"{where} has the table {key!r}; a name with dots needs quotes: {table_name(f'{name}.{key}')}"
    return f"{where} has the unknown key {key!r}{advice}"
