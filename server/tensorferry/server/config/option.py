"""Declaration of options: one dataclass field has everything about an option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

from tensorferry.server.config.parsers import Parser
from tensorferry.server.errors import ConfigError

_T = TypeVar("_T")


class OptionScope(Enum):
    """Where an option has an effect; the values are the notes in the documentation.

    A replica of Ray Serve refuses STANDALONE options, because it has no port of its own, shares its clients with other
    replicas, and sends nothing out but responses.
    """

    EVERYWHERE = ""
    STANDALONE = "not under Ray Serve"
    CUDA = "only on a GPU"


def option(
    default: _T,
    parser: Parser[_T],
    help: str,
    *,
    flag: str = "",
    scope: OptionScope = OptionScope.EVERYWHERE,
    separator: str = "",
    per_model: bool = False,
) -> _T:
    """Return a dataclass field that is an option.

    The flag is the field's name with hyphens unless `flag` says otherwise. With a `separator` the flag can be given
    several times, and the file can have a list: their texts are joined by the separator. An option that is `per_model`
    can also be a key of a model's table in the file. `scope` and `per_model` are not given in groups whose options all
    have the same: `GROUPS` has them.
    """
    metadata = {
        "parser": parser,
        "help": help,
        "flag": flag,
        "scope": scope,
        "separator": separator,
        "per_model": per_model,
    }
    value: _T = field(default=default, metadata=metadata)
    return value


@dataclass(frozen=True, slots=True)
class Option:
    """An option as flags, environment, file, help and documentation use it; all names derive from the flag."""

    field: str
    group: str
    flag: str
    default: Any
    parser: Parser[Any]
    help: str
    scope: OptionScope
    separator: str
    per_model: bool

    @property
    def variable(self) -> str:
        """The name of the environment variable."""
        return variable_of(self.flag)

    @property
    def default_text(self) -> str | None:
        """The default as an operator would write it; None if there is none."""
        return self.parser.format(self.default)

    def accepts(self, text: str) -> bool:
        """Return whether a text is a valid value."""
        try:
            self.parser.parse(text)
        except ValueError:
            return False
        return True

    def value(self, text: str, source: str) -> Any:
        """Return the value of a text; ConfigError names `source`, the place of the text."""
        try:
            return self.parser.parse(text)
        except ValueError:
            raise ConfigError(f"{source} is {text!r}; it must be {self.parser.allowed}") from None

    def take(self, values: dict[str, Any], place: str) -> str | None:
        """Remove the option from the values of a file or of one of its tables, and return its text; None if it is not there.

        Its key has hyphens or underscores. ConfigError, which names the place, if the option is given in both spellings.
        """
        key = self.flag.replace("-", "_")
        found = [values.pop(name) for name in dict.fromkeys((self.flag, key)) if name in values]
        if len(found) > 1:
            raise ConfigError(
                f"{place} has both {self.flag} and {key}, which are the same option; leave out one of them"
            )
        if not found:
            return None
        if self.separator and isinstance(found[0], list):
            return self.separator.join(map(str, found[0]))
        return str(found[0]).lower() if isinstance(found[0], bool) else str(found[0])


def variable_of(flag: str) -> str:
    """Return the environment variable of a flag."""
    return "TENSORFERRY_" + flag.replace("-", "_").upper()


def options_in(group: type, title: str, of_all: Mapping[str, Any]) -> Iterator[Option]:
    """Yield the options of a dataclass whose fields are made by `option`. All have the settings `of_all`."""
    for each in fields(group):
        flag = each.metadata["flag"] or each.name.replace("_", "-")
        settings = {**each.metadata, **of_all, "flag": flag}
        yield Option(field=each.name, group=title, default=each.default, **settings)
