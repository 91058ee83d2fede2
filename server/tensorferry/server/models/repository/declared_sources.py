"""Models that Python files declare, in the order in which they can be loaded."""

from __future__ import annotations

import ast
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tensorferry.server.config.server_config import PYTHON_SUFFIX, ModelSource
from tensorferry.server.errors import StartError
from tensorferry.server.models.config_pbtxt.ensembles import is_ensemble, named_models
from tensorferry.server.python.functions.app_file import import_alone, import_app
from tensorferry.server.python.triton.python_model import is_triton_model, triton_model
from tensorferry.serving import PipelineModel

_log = logging.getLogger("tensorferry.server")

# The functions that call a model.
_CALLS = ("infer", "submit")


def declared_sources(sources: Sequence[ModelSource]) -> Sequence[ModelSource]:
    """Return the sources, with the models of each Python file in its place.

    A model that is a step of a pipeline is not served by itself, because it would be loaded twice. A pipeline follows the
    models that it names as steps. StartError if a file cannot be imported, two models have the same
    name, or pipelines name each other as steps.
    """
    found: dict[str, ModelSource] = {}
    for source in sources:
        for one in _models_of(source):
            if (other := found.setdefault(one.name, one)) is not one:
                raise StartError(
                    f"two models are named {one.name!r}, in {other.path} and {one.path}; rename one of them"
                )
    return _in_order(found)


def warn_of_unknown_calls(sources: Sequence[ModelSource], known: Collection[str]) -> None:
    """Log the calls of models, by names in the code of Python files, that are not among those that the server has."""
    for path in dict.fromkeys(source.path for source in sources if source.path.suffix == PYTHON_SUFFIX):
        for name, line in _calls_in(path):
            if name not in known:
                _log.warning(
                    "%s:%d calls the model %r, which this server does not have; it has %s",
                    *(path, line, name, ", ".join(sorted(known))),
                )


def _calls_in(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name of the model and the line of each call whose name is written in it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called, first = node.func, node.args[0]
        function = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        if function in _CALLS and isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value, node.lineno


def declared_source(source: ModelSource) -> ModelSource:
    """Return a source in a repository with what its file declares, if that is a Python file: the model of the source's name.

    StartError if the file cannot be imported, or declares other models only.
    """
    if source.path.suffix != PYTHON_SUFFIX or source.declaration is not None:
        return source
    if is_triton_model(source.path):
        declaration, config = triton_model(source.name, source.version, source.path, source.config)
        return replace(source, declaration=declaration, config=config)
    declared = import_alone(source.path)
    found = declared.get(source.name)
    if found is None and len(declared) == 1:
        (found,) = declared.values()
    if found is None:
        raise StartError(
            f"{source.path} declares the models {', '.join(map(repr, declared))}; a file in a model repository must declare one "
            f"named {source.name!r}, as its directory is, or a single model"
        )
    return replace(source, declaration=found)


def _models_of(source: ModelSource) -> Sequence[ModelSource]:
    if source.path.suffix != PYTHON_SUFFIX or source.declaration is not None:
        return [source]
    if is_triton_model(source.path):
        name = source.path.stem
        declaration, config = triton_model(name, source.version, source.path, None)
        return [replace(source, name=name, declaration=declaration, config=config)]
    declared = import_app(source.path)
    steps = {
        step.model
        for declaration in declared.values()
        if isinstance(declaration, PipelineModel)
        for step in declaration.steps
    }
    return [
        replace(source, name=name, declaration=declaration)
        for name, declaration in declared.items()
        if declaration not in steps
    ]


def _in_order(found: dict[str, ModelSource]) -> Sequence[ModelSource]:
    ordered: dict[str, ModelSource] = {}

    def add(source: ModelSource, users: tuple[str, ...]) -> None:
        if source.name in users:
            raise StartError(f"pipelines name each other as steps: {' -> '.join((*users, source.name))}")
        for name in named_steps(source):
            if name in found:
                add(found[name], (*users, source.name))
        ordered.setdefault(source.name, source)

    for source in found.values():
        add(source, ())
    return list(ordered.values())


def named_steps(source: ModelSource) -> Sequence[str]:
    """Return the names of the other models that the steps of a pipeline or an ensemble name, each once."""
    if is_ensemble(source.config):
        return list(dict.fromkeys(named.name for named in named_models(source.config)))
    if not isinstance(source.declaration, PipelineModel):
        return ()
    return list(dict.fromkeys(step.model for step in source.declaration.steps if isinstance(step.model, str)))
