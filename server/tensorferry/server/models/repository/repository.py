"""Model repositories on disk, in Triton's layout: their models, and which versions are to be served.

    ROOT/NAME/config.pbtxt          optional
    ROOT/NAME/VERSION/model.onnx    or the file or directory that default_model_filename names; or model.py, a Python file
                                    that declares the model; of an ensemble nothing

This module loads no models. Each call reads the directories again. A repository elsewhere has a mirror, which lists it when it
is refreshed and fetches the files of versions to be served.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.directory_advice import advice_for
from tensorferry.server.config.server_config import PYTHON_SUFFIX, ModelSource
from tensorferry.server.errors import StartError
from tensorferry.server.models.config_pbtxt.ensembles import is_ensemble
from tensorferry.server.models.config_pbtxt.pbtxt import PYTHON, named_libraries, read_config
from tensorferry.server.models.remote.repository_mirror import RepositoryMirror
from tensorferry.server.names import NAME, VERSION

CONFIG_FILE = "config.pbtxt"
_MODEL_FILE = "model.onnx"
_PYTHON_FILE = "model.py"


class RepositoryError(StartError):
    """A model in the repository cannot be served. The message names the directory and what to change."""


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version to be served. Its fingerprint is equal as long as its files do not change."""

    source: ModelSource
    fingerprint: Hashable


class Repository:
    """Directories of models. Thread-safe without mirrors, because it keeps only paths.

    With mirrors, one thread at a time may call `refresh` and `versions`; `names` is thread-safe.
    """

    def __init__(self, roots: Sequence[Path | RepositoryMirror]) -> None:
        self.roots = tuple(root if isinstance(root, Path) else root.root for root in roots)
        self._mirrors = {root.root: root for root in roots if not isinstance(root, Path)}

    def refresh(self) -> None:
        """List the repositories elsewhere again. StartError if one cannot be listed."""
        for mirror in self._mirrors.values():
            mirror.refresh()

    def names(self) -> Sequence[str]:
        """Return the names of all models, sorted. RepositoryError if a directory cannot be read."""
        return sorted({name for root in self.roots for name in _names(root)})

    def empty_roots(self) -> Sequence[str]:
        """Return an explanation, with what to change, for each directory without a model.

        RepositoryError if a directory cannot be read.
        """
        return [
            f"the model repository {root} has no model, NAME/VERSION/{_MODEL_FILE} with a number of at least 1 as VERSION"
            + (f": {advice}" if (advice := advice_for(root)) else "")
            for root in self.roots
            if not _names(root)
        ]

    def versions(self, name: str, config: ModelConfig | None = None) -> Sequence[ServedVersion]:
        """Return the versions that the model's version policy selects, ascending; empty if there is no such model.

        `config` replaces the config file. RepositoryError if the model is in two repositories or cannot be served.
        """
        directories = [root / name for root in self.roots if name in _directories(root)]
        if not directories:
            return ()
        if len(directories) > 1:
            raise RepositoryError(
                f"model {name!r} is not unique across the model repositories: it is in "
                f"{' and '.join(map(str, directories))}; remove one"
            )
        (directory,) = directories
        try:
            versions = _versions(directory, config, self._mirrors.get(directory.parent))
        except (OSError, StartError) as error:
            if not directory.is_dir():
                return ()
            if isinstance(error, StartError):
                raise
            raise RepositoryError(f"{directory} cannot be read: {error}") from None
        # A directory that was removed meanwhile may have been read in part.
        return versions if directory.is_dir() else ()


def _names(root: Path) -> Sequence[str]:
    """Return the names of the models in a directory; empty if it is not a repository."""
    names = _directories(root)
    return names if any(_is_model_directory(root / name) for name in names) else ()


def _is_model_directory(directory: Path) -> bool:
    """Whether the directory looks like a model's."""
    try:
        return (directory / CONFIG_FILE).is_file() or any(map(_is_version, directory.iterdir()))
    except OSError:
        # The error is reported when the model is loaded.
        return True


def _directories(root: Path) -> Sequence[str]:
    try:
        found = [entry.name for entry in root.iterdir() if entry.is_dir()]
    except OSError as error:
        raise RepositoryError(
            f"the model repository {str(root)!r} cannot be read: {error}; it must be a directory of models"
        ) from None
    # Other directories, such as `.git` and `lost+found`, are not models.
    return [name for name in found if NAME.fullmatch(name)]


def _versions(
    directory: Path, given: ModelConfig | None, mirror: RepositoryMirror | None
) -> Sequence[ServedVersion]:
    if mirror is not None:
        mirror.fetch(directory.name)
    file = directory / CONFIG_FILE
    present = {int(entry.name): entry for entry in directory.iterdir() if _is_version(entry)}
    # Before they are read, so that a change meanwhile is found by the next look.
    files = _files(directory, skip=present)
    config = given
    if config is None and file.is_file():
        config = read_config(file)
    elif config is not None:
        _check_libraries(config, file)
    if config is not None and config.name and config.name != directory.name:
        raise RepositoryError(
            f"{file} has the name {config.name!r}; it must be that of its directory, {directory.name!r}, or none"
        )
    selected = _by_policy(present, config)
    if not selected:
        found = f"version {', '.join(map(str, sorted(present)))}" if present else "none"
        raise RepositoryError(
            f"at least one version must be available under the version policy of model {directory.name!r}: {directory} has "
            f"{found} ({_policy(config)}); a version is a directory whose name is a number of at least 1"
        )
    if mirror is not None:
        _check_remote_libraries(config, mirror, file)
        for number in selected:
            mirror.fetch(f"{directory.name}/{number}")
    # Not b"" without one, because an empty configuration is one, too.
    common = (given.SerializeToString(deterministic=True) if given is not None else None, files)
    fingerprints = {number: (common, _files(present[number])) for number in selected}
    paths = {
        number: file if is_ensemble(config) else _model_file(present[number], config) for number in selected
    }
    if given is not None:
        _check_code(file, present, paths)
    versions = []
    for number, path in paths.items():
        source = ModelSource(directory.name, path, str(number), config, directory)
        versions.append(ServedVersion(source, fingerprints[number]))
    return versions


def _model_file(version: Path, config: ModelConfig | None) -> Path:
    """Return the path of a version's file, whether it exists or not."""
    named = config.default_model_filename if config is not None else ""
    if "\0" in named or Path(named).is_absolute() or ".." in Path(named).parts:
        # Checked because a client may send the configuration.
        raise RepositoryError(
            f"{version.parent}: default_model_filename is {named!r}; it must be a file or directory in the version's "
            "directory"
        )
    path = version / (named or _MODEL_FILE)
    python = config is not None and config.backend == PYTHON
    if not named and (python or (not path.exists() and (version / _PYTHON_FILE).is_file())):
        return version / _PYTHON_FILE
    return path / _MODEL_FILE if path.is_dir() else path


def _check_code(file: Path, present: dict[int, Path], chosen: Mapping[int, Path]) -> None:
    """Raise RepositoryError if a client's configuration chooses a Python file that the model's own file does not choose.

    `chosen` has the file of each version. Python code runs in the server, so no client may choose it, not even among the
    repository's files.
    """
    code = {number: path for number, path in chosen.items() if path.suffix == PYTHON_SUFFIX}
    if not code:
        return
    own = read_config(file) if file.is_file() else None
    served = {} if is_ensemble(own) else {n: _model_file(present[n], own) for n in _by_policy(present, own)}
    for number, path in code.items():
        if served.get(number) != path:
            raise RepositoryError(
                f"the configuration in the request chooses the Python file {path}, which {file} does not choose; a client cannot "
                "choose code: leave out default_model_filename, backend and version_policy, or let the operator change the "
                "model's own configuration"
            )


def _check_libraries(given: ModelConfig, file: Path) -> None:
    """Raise RepositoryError if a client's configuration names a library that the model's own file does not name.

    A library is code that runs in the server, so no client may choose one, not even among the repository's files.
    """
    named = named_libraries(given)
    if named and file.is_file():
        named -= named_libraries(read_config(file))
    if named:
        raise RepositoryError(
            f"the configuration in the request has the library {', '.join(map(repr, sorted(named)))}, which {file} does "
            "not have; a client cannot choose libraries: leave it out, or let the operator name it there"
        )


def _check_remote_libraries(config: ModelConfig | None, mirror: RepositoryMirror, file: Path) -> None:
    """Raise RepositoryError if the configuration of a model elsewhere names a library, and code from there is not allowed."""
    named = frozenset() if config is None or mirror.allow_code else named_libraries(config)
    if named:
        raise RepositoryError(
            f"{file} has the library {', '.join(map(repr, sorted(named)))}, which would run in the server; a repository elsewhere "
            "cannot choose libraries without --allow-remote-code"
        )


def _is_version(entry: Path) -> bool:
    return VERSION.fullmatch(entry.name) is not None and entry.is_dir()


def _by_policy(present: dict[int, Path], config: ModelConfig | None) -> Sequence[int]:
    """Return the versions that Triton's `version_policy` selects; by default the highest."""
    numbers = sorted(present)
    choice = config.version_policy.WhichOneof("policy_choice") if config is not None else None
    if config is None or choice in (None, "latest"):
        count = config.version_policy.latest.num_versions if config is not None else 1
        return numbers[-(count or 1) :]
    if choice == "all":
        return numbers
    return [number for number in numbers if number in config.version_policy.specific.versions]


def _policy(config: ModelConfig | None) -> str:
    if config is None or not config.HasField("version_policy"):
        return "the latest serves"
    return f"version_policy {{ {' '.join(str(config.version_policy).split())} }}"


def _files(directory: Path, skip: dict[int, Path] | None = None) -> Hashable:
    """Return the path, size, modification time and inode of each file in the directory tree."""
    found = []
    skipped = set((skip or {}).values())
    for entry in sorted(directory.iterdir()):
        # Python writes bytecode beside code that it imports.
        if entry in skipped or entry.name == "__pycache__":
            continue
        # A link that leads nowhere is no file. Emacs makes one beside a file that is edited.
        if entry.is_symlink() and not entry.exists():
            continue
        # A link to a directory is not followed, because it may lead to a parent directory.
        if entry.is_dir() and not entry.is_symlink():
            found.append((entry.name, _files(entry)))
        else:
            status = entry.stat()
            found.append((entry.name, (status.st_size, status.st_mtime_ns, status.st_ino)))
    return tuple(found)
