"""Import of an app file: the Python file in which a user declares models."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
)
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from tensorferry.server.errors import StartError
from tensorferry.server.python.functions.failure import traceback_text
from tensorferry.serving import Declaration, DeclarationError, FunctionModel, OnnxModel, PipelineModel
from tensorferry.serving.declarations import MADE_PIPELINES

_log = logging.getLogger("tensorferry.server")


def import_alone(path: Path) -> dict[str, Declaration]:
    """Import a file as `import_app` does, but so that it shares no neighbours with other files.

    The Python files beside it are imported again, for this file only. Only while it is imported is its directory in
    `sys.path`.
    """
    with _alone(path):
        return import_app(path)


def import_module(path: Path) -> ModuleType:
    """Import a file as `import_alone` does, and return the module. StartError, with the traceback, if the file fails."""
    with _alone(path):
        return _import(path.absolute())


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    directory = path.absolute().parent
    own = {entry.stem for entry in directory.glob("*.py")}
    own |= {entry.parent.name for entry in directory.glob("*/__init__.py")}
    others = _take_modules(own)
    paths = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = paths
        _take_modules(own)
        sys.modules.update(others)


def _take_modules(names: Set[str]) -> dict[str, ModuleType]:
    """Remove these modules and what is in them from those that are imported, and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}


def import_app(path: Path) -> dict[str, Declaration]:
    """Import a file and return the models that it declares, by name.

    They are those bound to names of the module that do not start with "_". Each call runs the file. Its directory becomes
    the first in `sys.path`, so it can import its neighbours. StartError, with the traceback that Python would print, if the
    file fails; StartError too if it declares no model, or two of the same name.
    """
    made: list[PipelineModel] = []
    token = MADE_PIPELINES.set(made)
    try:
        module = _import(path.absolute())
    finally:
        MADE_PIPELINES.reset(token)
    bound = {id(value) for value in vars(module).values()}
    for pipeline in made:
        if id(pipeline) not in bound:
            text = "%s: pipeline %r is bound to no name of the module, so it is not served; write NAME = pipeline(...)"
            _log.warning(text, path, pipeline.name)
    declared: dict[str, Declaration] = {}
    for own, value in vars(module).items():
        if own.startswith("_") or not isinstance(value, (FunctionModel, OnnxModel, PipelineModel)):
            continue
        if declared.setdefault(value.name, value) is not value:
            raise StartError(
                f"{path} declares two models named {value.name!r}; give one of them another `name`, or bind it to a "
                "name that starts with '_' if it is only a step"
            )
    if not declared:
        raise StartError(
            f"{path} declares no model; decorate a function with @model, or bind onnx(...) or pipeline(...) to a name of "
            "the module that does not start with '_'"
        )
    return declared


def find_function(declared: Mapping[str, Declaration], name: str, path: Path) -> FunctionModel:
    """Return the function of a name among models that `import_app` returned, and the steps of pipelines.

    StartError if there is none, or several.
    """
    # A dict keeps the order, and has each function once: declarations are equal only if they are the same.
    functions: dict[FunctionModel, None] = {}
    for each in declared.values():
        steps = [step.model for step in each.steps] if isinstance(each, PipelineModel) else [each]
        functions.update(
            (each, None) for each in steps if isinstance(each, FunctionModel) and each.name == name
        )
    if len(functions) == 1:
        return next(iter(functions))
    if not functions:
        raise StartError(
            f"{path} declares no function named {name!r} when a child process imports it; declare the same models in "
            "every process"
        )
    raise StartError(
        f"{path} declares {len(functions)} functions named {name!r}; a function that runs in processes needs a name of "
        "its own: give another `name`"
    )


def _import(path: Path) -> ModuleType:
    name = _module_name(path)
    loader = _SourceLoader(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    directory = str(path.parent)
    if directory in sys.path:
        sys.path.remove(directory)
    sys.path.insert(0, directory)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        with _without_bytecode(directory):
            exec(loader.source_to_code(path.read_bytes(), str(path)), vars(module))
    except BaseException as error:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        if isinstance(error, KeyboardInterrupt):
            raise
        if isinstance(error, OSError) and error.filename == str(path):
            raise StartError(f"{path}: {error.strerror}") from None
        if isinstance(error, DeclarationError):
            lines = [
                line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)
            ]
            where = f"{path}:{lines[-1]}" if lines else str(path)
            raise StartError(f"{where}: {error}") from None
        raise StartError(f"{path} cannot be imported:\n{traceback_text(error)}") from None
    return module


class _SourceLoader(SourceFileLoader):
    """Neither reads nor writes files of bytecode. One with the time and size of a changed source would be used."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Say that the source has no time, with which bytecode could be compared."""
        raise OSError


@contextmanager
def _without_bytecode(directory: str) -> Iterator[None]:
    """Import what is found through this entry of `sys.path` from its source."""

    def find(path: str) -> FileFinder:
        entries = [entry for entry in sys.path if entry and Path(path).is_relative_to(entry)]
        if max(entries, key=len, default="") != directory:
            raise ImportError
        return FileFinder(path, (ExtensionFileLoader, EXTENSION_SUFFIXES), (_SourceLoader, SOURCE_SUFFIXES))

    sys.path_hooks.insert(0, find)
    _forget_finders(directory)
    try:
        yield
    finally:
        sys.path_hooks.remove(find)
        _forget_finders(directory)


def _forget_finders(directory: str) -> None:
    for path in list(sys.path_importer_cache):
        if Path(path).is_relative_to(directory):
            sys.path_importer_cache.pop(path, None)


def _module_name(path: Path) -> str:
    """Return a name that no other module has, and the same one when the file is imported again."""
    for number in count(1):
        name = f"tensorferry_app_{path.stem.replace('.', '_')}" + (f"_{number}" if number > 1 else "")
        module = sys.modules.get(name)
        if module is None or getattr(module, "__file__", None) == str(path):
            break
    return name
