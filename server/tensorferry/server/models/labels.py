"""Label files of the classification extension."""

from __future__ import annotations

from pathlib import Path

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.errors import StartError


def read_labels(config: ModelConfig | None, directory: Path | None) -> dict[str, tuple[str, ...]]:
    """Return the labels of a model's outputs, from the label files of its configuration with one label per line.

    StartError names a file that is missing or outside the model's directory. Bytes that are not UTF-8 are kept.
    """
    labels: dict[str, tuple[str, ...]] = {}
    if config is None or directory is None:
        return labels
    for output in config.output:
        if not output.label_filename:
            continue
        where = f"label_filename of output {output.name!r} is {output.label_filename!r}"
        if "\0" in output.label_filename:
            raise StartError(f"{directory}: {where}, which is no file name")
        path = (directory / output.label_filename).resolve()
        if not path.is_relative_to(directory.resolve()):
            raise StartError(f"{directory}: {where}, which is outside of the model's directory")
        try:
            text = path.read_bytes().decode(errors="surrogateescape")
        except OSError as error:
            raise StartError(f"{directory}: {where}, which cannot be read ({error.strerror})") from None
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        # Files from Windows end lines with a carriage return, which Triton keeps in the label.
        labels[output.name] = tuple(line.removesuffix("\r") for line in lines)
    return labels
