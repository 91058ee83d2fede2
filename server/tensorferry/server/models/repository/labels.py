"""Label files of the classification extension."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.errors import ServerError, StartError
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.models.remote.url import is_safe
from tensorferry.server.models.repository.repository import CONFIG_FILE
from tensorferry.server.python.steps.planning import Plan

_Labels = Mapping[str, Sequence[str]]


class StepLabels(_Labels):
    """The labels of a pipeline's outputs: its own, or those that the models named by its steps have now."""

    def __init__(self, own: _Labels, plan: Plan, registry: ModelRegistry) -> None:
        self._own = own
        self._registry = registry
        self._producers = {
            tensor: (step.used, output)
            for stage in plan.stages
            for step in stage.steps
            if step.used is not None
            for output, tensor in step.outputs.items()
        }

    def __getitem__(self, output: str) -> Sequence[str]:
        if output in self._own:
            return self._own[output]
        used, name = self._producers[output]
        try:
            return self._registry.step_model(used.name, used.version).labels[name]
        except ServerError:
            raise KeyError(output) from None

    def __iter__(self) -> Iterator[str]:
        return iter([output for output in {**self._own, **self._producers} if output in self])

    def __len__(self) -> int:
        return len(list(self))


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
        inside = path.is_relative_to(directory.resolve())
        if not inside and is_safe(output.label_filename):
            # Files of a repository elsewhere are links into the cache, as the configuration is.
            inside = path.is_relative_to((directory / CONFIG_FILE).resolve().parent)
        if not inside:
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
