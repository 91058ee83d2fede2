"""A model repository on disk, in Triton's layout: which models there are, and which of their versions serve.

    ROOT/NAME/config.pbtxt          optional
    ROOT/NAME/VERSION/model.onnx    or the file, or directory with such a file, that the config names

Nothing is loaded here. A model is looked at again whenever it is asked for, so what is found is of
that moment.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorferry.protos.model_config_pb2 import ModelConfig
from tensorferry.server.config.server_config import ModelSource
from tensorferry.server.errors import StartError
from tensorferry.server.model_config.pbtxt import read_config
from tensorferry.server.names import NAME

CONFIG_FILE = "config.pbtxt"
_MODEL_FILE = "model.onnx"


class RepositoryError(StartError):
    """A model in the repository cannot be served as it is: the message names the directory and what to change."""


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version that serves, and what its files looked like: equal when nothing has changed."""

    source: ModelSource
    fingerprint: Hashable


class Repository:
    """Directories of models. Thread-safe: it keeps nothing but their paths."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)

    def names(self) -> Sequence[str]:
        """The names of all models, in order. RepositoryError when a directory cannot be read."""
        return sorted({name for root in self.roots for name in _names(root)})

    def empty_roots(self) -> Sequence[str]:
        """For each directory without any model, what is wrong with it and what to change.

        RepositoryError when a directory cannot be read.
        """
        return [_emptiness(root) for root in self.roots if not _names(root)]

    def versions(self, name: str, config: ModelConfig | None = None) -> Sequence[ServedVersion]:
        """The model's versions that its policy has serve, ascending; none when there is no such model.

        `config` takes the place of the config file. RepositoryError when the model is in two
        repositories, or as it is cannot be served.
        """
        homes = [root / name for root in self.roots if name in _directories(root)]
        if not homes:
            return ()
        if len(homes) > 1:
            raise RepositoryError(
                f"model {name!r} is not unique across the model repositories: it is in "
                f"{' and '.join(map(str, homes))}; remove one"
            )
        (home,) = homes
        try:
            return _versions(home, config)
        except OSError as error:
            raise RepositoryError(f"{home} cannot be read: {error}") from None


def _names(root: Path) -> Sequence[str]:
    """Of the models in a directory; none for a directory that is no repository."""
    names = _directories(root)
    return names if any(_is_home(root / name) for name in names) else ()


def _is_home(directory: Path) -> bool:
    """Whether it looks like a model's directory."""
    try:
        return (directory / CONFIG_FILE).is_file() or any(map(_is_version, directory.iterdir()))
    except OSError:
        # Said when the model is loaded.
        return True


def _emptiness(root: Path) -> str:
    if _is_home(root):
        return (
            f"the model repository {root} is the directory of one model: give the directory that it is in, "
            f"--model-repository {root.absolute().parent}"
        )
    files = sorted(file.name for file in root.glob("*.onnx"))
    if files:
        return (
            f"the model repository {root} has no model: it has files such as {files[0]}, which belongs at "
            f"{root / files[0].removesuffix('.onnx') / '1' / _MODEL_FILE}, or on the command line: tensorferry serve "
            f"{root / files[0]}"
        )
    return (
        f"the model repository {root} has no model: no file in it is at NAME/VERSION/{_MODEL_FILE}, where VERSION is a "
        "number of at least 1"
    )


def _directories(root: Path) -> Sequence[str]:
    try:
        found = [entry.name for entry in root.iterdir() if entry.is_dir()]
    except OSError as error:
        raise RepositoryError(
            f"the model repository {str(root)!r} cannot be read: {error}; it must be a directory of models"
        ) from None
    # Others are no models of ours: `.git`, `lost+found`.
    return [name for name in found if NAME.fullmatch(name)]


def _versions(home: Path, given: ModelConfig | None) -> Sequence[ServedVersion]:
    file = home / CONFIG_FILE
    config = given
    if config is None and file.is_file():
        config = read_config(file)
    if config is not None and config.name and config.name != home.name:
        raise RepositoryError(
            f"{file} has the name {config.name!r}; it must be that of its directory, {home.name!r}, or none"
        )
    there = {int(entry.name): entry for entry in home.iterdir() if _is_version(entry)}
    serving = _by_policy(there, config)
    if not serving:
        raise RepositoryError(
            f"at least one version must be available under the version policy of model {home.name!r}: {home} has "
            f"{_listed(there)} ({_policy(config)}); a version is a directory whose name is a number of at least 1"
        )
    common = (
        given.SerializeToString(deterministic=True) if given is not None else b"",
        _files(home, skip=there),
    )
    file_name = (config.default_model_filename if config is not None else "") or _MODEL_FILE
    if Path(file_name).is_absolute() or ".." in Path(file_name).parts:
        # A client's own configuration may name it.
        raise RepositoryError(
            f"{home}: default_model_filename is {file_name!r}; it must be a file, or a directory, in that of the version"
        )
    versions = []
    for number in serving:
        path = there[number] / file_name
        if path.is_dir():
            path /= _MODEL_FILE
        source = ModelSource(home.name, path, str(number), config, home)
        versions.append(ServedVersion(source, (common, _files(there[number]))))
    return versions


def _is_version(entry: Path) -> bool:
    return entry.name.isascii() and entry.name.isdecimal() and entry.name[0] != "0" and entry.is_dir()


def _by_policy(there: dict[int, Path], config: ModelConfig | None) -> Sequence[int]:
    """As Triton's `version_policy`: the highest, unless it says otherwise."""
    numbers = sorted(there)
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


def _listed(there: dict[int, Path]) -> str:
    return f"version {', '.join(map(str, sorted(there)))}" if there else "none"


def _files(directory: Path, skip: dict[int, Path] | None = None) -> Hashable:
    """Of each file in the directory and below: where, how large, and when it was changed."""
    found = []
    skipped = set((skip or {}).values())
    for entry in sorted(directory.iterdir()):
        if entry in skipped:
            continue
        # A link to a directory is not followed: it may lead to one that this is in.
        if entry.is_dir() and not entry.is_symlink():
            found.append((entry.name, _files(entry)))
        else:
            status = entry.stat()
            found.append((entry.name, (status.st_size, status.st_mtime_ns, status.st_ino)))
    return tuple(found)
