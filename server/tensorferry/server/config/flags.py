"""Command-line flags of options: definition, help, and parsing to texts."""

from __future__ import annotations

import argparse
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from tensorferry.server.config.option import Option
from tensorferry.server.errors import ConfigError

# Options that the server does not have, by what replaces each. To give one is an error that names its replacement.
REPLACED: Mapping[str, str] = {
    "front-ends": "--processes, the number of whole server processes: give --processes N, or --processes auto",
    "trace-file": "--otel, spans of OpenTelemetry, and --access-log",
    "inter-threads": "the parameter inter_op_thread_count of the model's config.pbtxt, with execution_mode 1",
    "cuda-memory-growth": "the parameter arena_extend_strategy of the model's config.pbtxt: 0 for doubling, 1 for exact",
    "cudnn-search": "the parameter cudnn_conv_algo_search of the model's config.pbtxt: 0 for exhaustive, 1 for heuristic, "
    "2 for default",
    "fp16-except": "the parameter fp16_except of the model's config.pbtxt: names, separated by commas",
    "client-burst": "--client-rate: an idle client may send the rows of one second at once",
    "auth-exempt-health": "a rule: health checks need no token; --tls-client-ca keeps clients without a certificate out",
    "max-strings": "a rule: a tensor has at most 65536 strings; send more in several requests",
}
# Flags of other servers for which `nearest` finds none of ours, or a wrong one.
ELSEWHERE: Mapping[str, str] = {
    "--grpc-port": "--port",
    "--grpc_port": "--port",
    "--grpc-address": "--host",
    "--address": "--host",
    "--grpc-use-ssl": "--tls-certificate",
    "--grpc-server-cert": "--tls-certificate",
    "--grpc-server-key": "--tls-key",
    "--exit-timeout-secs": "--drain-seconds",
    "--workers": "--processes",
    "--workers-per-device": "--instances",
    "--gpu": "--device cuda",
    "--accelerator": "--device",
    "--batch-timeout": "--max-queue-delay-ms",
}

# The environment variable that names the file of --config.
CONFIG_VARIABLE = "TENSORFERRY_CONFIG"

_SWITCHES = "A switch without a value means true; --no-NAME means false."


class CommandParser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (--help shows all options)\n")


def add_flags(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    """Add --config, and the flags of these options, grouped as in the table; `read_flags` reads them."""
    parser.add_argument("--config", metavar="FILE", help=f"TOML file (also {CONFIG_VARIABLE})")
    for title, group in groupby(options, lambda option: option.group):
        arguments = parser.add_argument_group(title)
        for option in group:
            default = option.default_text
            arguments.add_argument(
                f"--{option.flag}",
                metavar=option.parser.metavar,
                action="append" if option.separator else "store",
                help=option.help if default is None else f"{option.help} (default: {default})",
            )
    parser.epilog = f"{_SWITCHES} {parser.epilog or ''}"


def read_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str], options: Sequence[Option]
) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Return all arguments, and the text of each option's flag, None if it is not given.

    Exits with code 2 for an unknown flag.
    """
    switches = {f"--{option.flag}": option for option in options if option.parser.switch}
    # Intermixed parsing accepts a MODEL before, between and after flags.
    parsed, unknown = parser.parse_known_intermixed_args(list(_with_switch_values(argv, switches)))
    for text in unknown:
        parser.error(_unknown(text, options))
    arguments = vars(parsed)
    flags = {option.flag: arguments[option.flag.replace("-", "_")] for option in options}
    for option in options:
        if option.separator and flags[option.flag] is not None:
            flags[option.flag] = option.separator.join(flags[option.flag])
    return arguments, flags


def config_file(arguments: Mapping[str, Any]) -> Path | None:
    """Return the file of --config, or of its environment variable. The arguments are those of `read_flags`."""
    file = arguments["config"] or os.environ.get(CONFIG_VARIABLE)
    return Path(file) if file else None


def _with_switch_values(argv: Sequence[str], switches: Mapping[str, Option]) -> Iterator[str]:
    """Yield the arguments with each switch as --x=VALUE, because argparse would take a MODEL after it as its value.

    Intermixed parsing does not support "--", after which all are MODELs: the paths there get another spelling instead.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    rest = deque(argv[:end])
    while rest:
        text = rest.popleft()
        if (option := switches.get(text)) is not None:
            value = rest.popleft() if rest and _is_value(rest[0], option) else "true"
            yield f"{text}={value}"
        elif text.startswith("--no-") and f"--{text[5:]}" in switches:
            yield f"--{text[5:]}=false"
        else:
            yield text
    yield from (f"./{text}" if text.startswith("-") else text for text in argv[end + 1 :])


def _is_value(text: str, option: Option) -> bool:
    """Return whether the argument after a switch is its value and not a path to a model."""
    return option.accepts(text) and re.fullmatch(r"true|false|[\d,]+", text, re.IGNORECASE) is not None


def _unknown(text: str, options: Sequence[Option]) -> str:
    if not text.startswith("-"):
        return f"unexpected argument {text!r}"
    flag, _, _ = text.partition("=")
    if (other := REPLACED.get(flag.removeprefix("--").removeprefix("no-"))) is not None:
        return f"{flag} is replaced by {other}"
    known = [f"--{option.flag}" for option in options]
    known += [f"--no-{option.flag}" for option in options if option.parser.switch]
    near = ELSEWHERE.get(flag) or nearest(flag, [*known, "--config", "--help"])
    return f"unknown flag {flag}" + (f"; did you mean {near}?" if near else "")


def refuse_replaced(values: Mapping[str, Any], place: str) -> None:
    """ConfigError for the first of a file's or table's keys that is a replaced option. `place` names the source."""
    for flag, other in REPLACED.items():
        if flag in values or flag.replace("-", "_") in values:
            raise ConfigError(f"{flag} in {place} is replaced by {other}")


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that is most similar to an unknown one; None if none is similar."""
    ending = f"-{name.lstrip('-')}"
    longer = [one for one in known if one.endswith(ending)] or [one for one in known if one.startswith(name)]
    return next(iter(longer or get_close_matches(name, known, 1)), None)
