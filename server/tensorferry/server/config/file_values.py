"""Values of options in the file of `--config`, as texts."""

from __future__ import annotations

from typing import Any

from tensorferry.server.config.option import Option
from tensorferry.server.errors import ConfigError


def take_text(values: dict[str, Any], option: Option, place: str) -> str | None:
    """Remove an option from the values of a file or of one of its tables, and return its text; None if it is not there.

    Its key has hyphens or underscores. ConfigError, which names the place, if the option is given in both spellings.
    """
    key = option.flag.replace("-", "_")
    found = [values.pop(name) for name in dict.fromkeys((option.flag, key)) if name in values]
    if len(found) > 1:
        raise ConfigError(
            f"{place} has both {option.flag} and {key}, which are the same option; leave out one of them"
        )
    return _text(found[0], option) if found else None


def _text(value: Any, option: Option) -> str:
    if option.separator and isinstance(value, list):
        return option.separator.join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
