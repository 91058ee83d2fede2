"""Check of the installed packages against the versions that tensorferry requires."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module, metadata
from typing import Any

from tensorferry.server.system.install_command import install_command

_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^\]]*\])?\s*([^;]*)")
_BOUND = re.compile(r"(>=|<=|<|>|==|!=)\s*([\d.]+)")
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
}


def wrong_versions() -> Iterator[str]:
    """Yield a sentence for each package with a wrong version, with the command that installs a right one."""
    for requirement in metadata.requires("tensorferry") or ():
        found = _REQUIREMENT.match(requirement)
        if found is None:
            continue
        name, bounds = found[1], found[2].strip().strip("()")
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            # It belongs to an extra that is not installed, or the caller reports its module as missing.
            continue
        if not all(
            _COMPARE[sign](_release(version), _release(bound)) for sign, bound in _BOUND.findall(bounds)
        ):
            yield f"{name} {version} is installed, which does not work: pip install '{name}{bounds}'"


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without trailing zeros: 5.29.0 is 5.29."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def imported(command: str, module: str, function: str) -> Any:
    """Return a function of a module. If the module cannot be imported, say on stderr why, and return None.

    The message names the command and the package that is missing or too old. Other exceptions pass.
    """
    try:
        return getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tensorferry"):
            raise
        print(
            f"tensorferry {command}: the package {error.name} is missing; {install_command('cpu')}, or with gpu in place of cpu, "
            "installs what the server needs",
            file=sys.stderr,
        )
    except Exception:
        # For example, generated code raises if grpcio or protobuf is too old.
        if not (problems := list(wrong_versions())):
            raise
        print("\n".join(f"tensorferry {command}: {problem}" for problem in problems), file=sys.stderr)
    return None
