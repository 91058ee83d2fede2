"""config.pbtxt, read."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.errors import StartError


class ModelConfigError(StartError):
    """A model's configuration cannot be used: the message names the file and the field."""


def read_config(path: Path) -> ModelConfig:
    """The configuration in a config.pbtxt."""
    try:
        return text_format.Parse(path.read_text(), ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ModelConfigError(f"{path}: {error}") from None
