"""What to do with a directory that is no model, or no repository of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# As many are named.
_MOST = 3


def advice_for(directory: Path, *, serves: bool = False) -> str:
    """Return which models a directory has, and how to name them, for `tensorferry serve` if it `serves`; "" if it has none."""
    if _versions(directory):
        return f"it is a model of a repository; give --model-repository {directory.absolute().parent}"
    if models := models_in_directory(directory):
        cure = f"give --model-repository {directory}" if serves else f"name one, such as {models[0]}"
        return f"it has the models {_some([home.name for home in models])}; {cure}"
    if files := sorted([*directory.glob("*.onnx"), *directory.glob("*/*.onnx")]):
        return f"it has {_some([str(file) for file in files])}; name a file itself"
    return ""


def models_in_directory(directory: Path) -> Sequence[Path]:
    """Return the directories of the models of a repository; none if the directory is a model itself."""
    if _versions(directory):
        return []
    return sorted(home for home in _folders(directory) if _versions(home))


def _versions(home: Path) -> bool:
    return any(
        version.name.isdecimal() and (any(version.glob("*.onnx")) or any(version.glob("model.py")))
        for version in _folders(home)
    )


def _folders(directory: Path) -> Sequence[Path]:
    """Return the directories in a directory; none if this process may not read it."""
    try:
        return [entry for entry in directory.iterdir() if entry.is_dir()]
    except PermissionError:
        return []


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
