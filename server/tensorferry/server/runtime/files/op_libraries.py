"""Libraries of custom operators: those of --custom-ops, and those that a model's configuration names."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from stat import S_ISREG
from typing import Any

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import ModelConfigError, StartError
from tensorferry.server.runtime.ort import onnxruntime, ort_message

_log = logging.getLogger("tensorferry.server")

# The value of --custom-ops for the package, and the package's module.
EXTENSIONS = "onnxruntime-extensions"
_MODULE = "onnxruntime_extensions"
# The package sets this to "python" when it is imported: the slow messages of protobuf, in which some of ours conflict.
_PROTOBUF_VARIABLE = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
# The domains of ONNX Runtime's own operators in a file, and those of the package's.
OWN_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")
EXTENSION_DOMAINS = ("ai.onnx.contrib", "com.microsoft.extensions")
INSTALL_EXTENSIONS = f"pip install {EXTENSIONS}"

# The function that ONNX Runtime calls in a library.
_ENTRY = "RegisterCustomOps"


@dataclass(frozen=True, slots=True)
class OpLibrary:
    """Shared library of custom operators. `named_by` says where its name was given, for messages.

    With `own_domains` it is known to define no operator in a domain of ONNX Runtime, so it replaces none.
    """

    path: Path
    named_by: str
    own_domains: bool = False


def libraries_for(config: ModelConfig, source: ModelSource, given: tuple[str, ...]) -> tuple[OpLibrary, ...]:
    """Return the libraries of a model's sessions: those of --custom-ops, then those of its configuration.

    A file that is named twice is returned once, because ONNX Runtime refuses two operators of one name. StartError names
    a library that is not usable, the reason and what to change.
    """
    of_server, of_model = server_libraries(given), tuple(_libraries_in(config, source))
    if not of_model:
        return of_server
    libraries = _each_once([*of_server, *of_model])
    _try(libraries)
    return libraries


@cache
def server_libraries(given: tuple[str, ...]) -> tuple[OpLibrary, ...]:
    """Return the libraries that --custom-ops names. StartError is as in `libraries_for`."""
    libraries = _each_once(map(_server_library, given))
    if libraries:
        _try(libraries)
    return libraries


def register(options: Any, libraries: Sequence[OpLibrary]) -> None:
    """Register libraries in the options of a session; raise StartError for one that cannot be loaded."""
    for library in libraries:
        try:
            options.register_custom_ops_library(str(library.path))
        except Exception as error:
            # Such as: Failed to load library /a.so with error: /a.so: invalid ELF header
            reason = str(error).rpartition(" with error: ")[2]
            expected = "it must be a shared library for this machine, with all libraries that it needs"
            if _ENTRY in reason:
                expected = f"a library of custom operators for ONNX Runtime exports the function {_ENTRY}"
            raise StartError(
                f"{library.named_by}, which ONNX Runtime cannot load: {reason}; {expected}"
            ) from error


def replacing_library(libraries: Sequence[OpLibrary]) -> OpLibrary | None:
    """Return a library that may replace operators of ONNX Runtime by its own; None if there is none."""
    return next((library for library in libraries if not library.own_domains), None)


def _server_library(given: str) -> OpLibrary:
    named_by = f"--custom-ops names {given!r}"
    path = Path(given)
    if _is_file(path, named_by):
        return OpLibrary(path.absolute(), named_by)
    if given.replace("_", "-") == EXTENSIONS:
        return _extensions(named_by)
    raise StartError(
        f"{named_by}, {'which is not a file' if path.exists() else 'but there is no such file'}; give the path of a "
        f"shared library (.so), or {EXTENSIONS} for the operators of that package"
    )


def _is_file(path: Path, named_by: str) -> bool:
    try:
        return S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        # Such as a directory that this process may not enter.
        raise StartError(f"{named_by}, which cannot be read: {error}") from None


def _extensions(named_by: str) -> OpLibrary:
    try:
        module = _import_extensions()
    except ModuleNotFoundError as error:
        missing = "that package" if error.name == _MODULE else f"its package {error.name}"
        raise StartError(f"{named_by}, but {missing} is not installed: {INSTALL_EXTENSIONS}") from None
    except Exception as error:
        raise StartError(
            f"{named_by}, but that package cannot be imported: {error}; install it again: {INSTALL_EXTENSIONS}"
        ) from error
    return OpLibrary(Path(module.get_library_path()), named_by, own_domains=True)


def _import_extensions() -> Any:
    """Import the package, and undo its change of a variable that the server's other processes would inherit."""
    before = os.environ.get(_PROTOBUF_VARIABLE)
    try:
        return import_module(_MODULE)
    finally:
        if before is None:
            os.environ.pop(_PROTOBUF_VARIABLE, None)
        else:
            os.environ[_PROTOBUF_VARIABLE] = before


def _libraries_in(config: ModelConfig, source: ModelSource) -> Iterator[OpLibrary]:
    directory = source.path.parent if source.directory is None else source.directory
    places = [directory / source.version, directory]
    for name in config.model_operations.op_library_filename:
        named_by = f"the configuration of model {source.name!r} has op_library_filename {name!r}"
        # An absolute path replaces the directory before it.
        found = next((place / name for place in places if _is_file(place / name, named_by)), None)
        if found is not None:
            yield OpLibrary(found.absolute(), named_by)
        elif name.replace("_", "-") == EXTENSIONS:
            yield _extensions(named_by)
        else:
            where = (
                "there is no such file"
                if Path(name).is_absolute()
                else f"it is not in {' or '.join(map(str, places))}"
            )
            raise ModelConfigError(
                f"{named_by}, but {where}; put the library there, or give its absolute path"
            )


def _each_once(libraries: Iterable[OpLibrary]) -> tuple[OpLibrary, ...]:
    return tuple({library.path.resolve(): library for library in libraries}.values())


def _try(libraries: Sequence[OpLibrary]) -> None:
    """Make a session with the libraries; raise StartError if one cannot be loaded, or if their operators conflict."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    # Logged first, because a library for another version of ONNX Runtime may end the process.
    _log.info("loading custom operators from %s", ", ".join(str(library.path) for library in libraries))
    register(options, libraries)
    try:
        onnxruntime.InferenceSession(_identity(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        named = "; ".join(library.named_by for library in libraries)
        raise StartError(
            f"{named}: ONNX Runtime refuses the operators: {ort_message(error)}; leave out the library that is to blame, "
            "such as one of two with the same domain"
        ) from error


def _identity() -> bytes:
    from onnx.parser import parse_model

    text = """<ir_version: 8, opset_import: ["" : 13]> identity (float[1] x) => (float[1] y) { y = Identity(x) }"""
    return bytes(parse_model(text).SerializeToString())
