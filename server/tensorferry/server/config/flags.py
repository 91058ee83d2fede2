"""Flags of a command line: made of options, shown in groups, and read as texts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from tensorferry.server.config.option_types import Option
from tensorferry.server.config.server_config import ServerConfig

# How `--help` groups them. A test holds this against all options.
GROUPS: Mapping[str, Sequence[str]] = {
    "models": ("model-repository", "model-control", "load-model", "repository-poll-seconds", "exit-on-error"),
    "network": (
        *("host", "port", "transport", "max-message-bytes", "max-metadata-bytes", "max-connections"),
        *("max-connection-age-seconds", "reflection"),
    ),
    "TLS and authentication": (
        *("tls-certificate", "tls-key", "tls-client-ca", "auth-tokens", "auth-certificates"),
        *("auth-exempt-health", "auth-over-plaintext"),
    ),
    "devices": (
        *(
            "device",
            "cuda-memory-bytes",
            "cuda-memory-growth",
            "cudnn-search",
            "tf32",
            "fp16",
            "fp16-tolerance",
        ),
        *("fp16-except", "cuda-graphs", "tensorrt-cache", "run-timeout-seconds", "exit-on-device-loss"),
    ),
    "batching and scheduling": (
        *("max-batch-size", "batching", "pad-lengths", "pad-values", "max-queue-delay-ms"),
        *("preferred-batch-sizes", "priority-weights", "default-priority", "slo-ms"),
    ),
    "limits for requests and all clients": (
        *("max-queue-size", "max-queue-bytes", "max-request-rows", "max-strings", "max-string-bytes"),
        *(
            "max-calls",
            "max-streams",
            "max-in-flight-per-stream",
            "max-unsent-bytes",
            "max-calls-per-connection",
        ),
    ),
    "limits for each client": (
        *("client-max-requests", "client-max-rows", "client-max-bytes", "client-rate", "client-burst"),
        *("fair-share", "client-weights"),
    ),
    "stopping": ("drain-seconds", "drain-delay-seconds"),
    "what clients may do": ("allow-shared-memory", "allow-log-settings", "triton-status-codes"),
    "metrics, traces and log": (
        *("metrics-port", "metrics-host", "trace-file", "otel", "access-log", "log-format", "log-level"),
    ),
}

_SWITCHES = "A switch alone means true; --no-NAME means false."


class CommandParser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        """Exit code 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (--help shows all options)\n")


def add_flags(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    """Adds the flags of these options; `read_flags` reads them."""
    by_flag = {option.flag: option for option in options}
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            if (option := by_flag.pop(flag, None)) is not None:
                _add(group, option)
    for option in by_flag.values():
        _add(parser, option)
    parser.epilog = f"{_SWITCHES} {parser.epilog or ''}"


def _add(parser: argparse._ActionsContainer, option: Option) -> None:
    default = shown_default(option)
    parser.add_argument(
        f"--{option.flag}",
        metavar=option.metavar,
        action="append" if option.separator else "store",
        help=option.help if default is None else f"{option.help} (default: {default})",
    )


def shown_default(option: Option) -> str | None:
    """The default as a user would write it; None if there is none."""
    default = getattr(ServerConfig(()), option.field)
    if default is None and option.flag == "metrics-port":
        return "none"
    if default is None or default == ():
        return "false" if option.switch and default is None else None
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if option.flag.endswith("-ms"):
        return f"{default * 1e3:g}"
    if option.flag.endswith("-bytes"):
        for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if default and default % (1 << shift) == 0 and option.takes(f"{default >> shift}{unit}"):
                return f"{default >> shift}{unit}"
    return f"{default:g}" if isinstance(default, float) else str(default)


def read_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str], options: Sequence[Option]
) -> tuple[dict[str, Any], dict[str, str | None]]:
    """All arguments, and the texts of the flags among them, None for one that is not given.

    Exits with code 2 for a flag that is not known.
    """
    switches = {f"--{option.flag}": option for option in options if option.switch}
    # Intermixed: a MODEL may stand before, between and behind flags. That does not know "--".
    parse = parser.parse_known_args if "--" in argv else parser.parse_known_intermixed_args
    parsed, unknown = parse(list(_written_out(argv, switches)))
    for text in unknown:
        parser.error(_unknown(text, options))
    arguments = vars(parsed)
    flags = {option.flag: arguments[option.flag.replace("-", "_")] for option in options}
    for option in options:
        if option.separator and flags[option.flag] is not None:
            flags[option.flag] = option.separator.join(flags[option.flag])
    return arguments, flags


def _written_out(argv: Sequence[str], switches: Mapping[str, Option]) -> Iterator[str]:
    """The same arguments with each switch as --x=VALUE, since argparse would take the MODEL behind it as its value."""
    rest = iter(argv)
    pending = next(rest, None)
    while (text := pending) is not None:
        pending = next(rest, None)
        if text == "--":
            yield text
            while pending is not None:
                yield pending
                pending = next(rest, None)
        elif (option := switches.get(text)) is not None:
            if pending is not None and _is_value(pending, option):
                yield f"{text}={pending}"
                pending = next(rest, None)
            else:
                yield f"{text}=true"
        elif text.startswith("--no-") and f"--{text[5:]}" in switches:
            yield f"--{text[5:]}=false"
        else:
            yield text


def _is_value(text: str, option: Option) -> bool:
    """Whether what stands behind a switch is its value; a path to a model is not."""
    return option.takes(text) and re.fullmatch(r"true|false|[\d,]+", text, re.IGNORECASE) is not None


def _unknown(text: str, options: Sequence[Option]) -> str:
    if not text.startswith("-"):
        return f"unexpected argument {text!r}"
    flag, _, _ = text.partition("=")
    known = [f"--{option.flag}" for option in options]
    known += [f"--no-{option.flag}" for option in options if option.switch]
    near = nearest(flag, [*known, "--config", "--help"])
    return f"unknown flag {flag}" + (f"; did you mean {near}?" if near else "")


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that the writer of an unknown one may have meant."""
    longer = [one for one in known if one.startswith(name)]
    return next(iter(longer or get_close_matches(name, known, 1)), None)
