"""Every flag in README and docs exists."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
from docs.pages import pages

from tensorferry.client.cli import bench, commands, infer, top
from tensorferry.server.cli import inspect, make_token, show_config
from tensorferry.server.config.flags import REPLACED
from tensorferry.server.config.server_config import OPTIONS

# Flags of other programs, and of scripts and make targets of this repository.
OTHERS = frozenset({
    "--apart", "--cap-drop", "--chmod", "--concurrency-range", "--create-namespace", "--docs", "--dynamic", "--enable-feature", "--go",
    "--go-grpc", "--grpc-java", "--image", "--install", "--java", "--labels", "--load", "--loads", "--minutes",
    "--namespace", "--no-deps", "--only", "--percentile", "--plugin", "--read-only", "--require-hashes", "--restart", "--results", "--rm", "--rounds",
    "--seconds", "--set", "--spare-core", "--strict", "--tmpfs", "--values",
})  # fmt: skip
SERVE = {f"--{option.flag}" for option in OPTIONS}


def flags_of_other_commands() -> set[str]:
    found: set[str] = set()
    for command in (
        infer.main,
        commands.models,
        commands.describe,
        commands.ready,
        bench.main,
        top.main,
        show_config.main,
        inspect.main,
        make_token.main,
    ):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
            command(["--help"])
        found.update(re.findall(r"--[a-z][\w-]+", printed.getvalue()))
    return found


def test_the_flags_of_each_page_exist() -> None:
    switches = {flag.replace("--", "--no-", 1) for flag in SERVE}
    known = SERVE | switches | {"--config"} | flags_of_other_commands() | OTHERS
    for page in pages():
        text = page.read_text()
        if page.name == "from_triton.md":
            # The first column has Triton's flags.
            text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
        # Flags with underscores are those of protoc.
        named = {flag for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", text) if "_" not in flag}
        if page.name == "CHANGELOG.md":
            named -= {f"--{removed}" for removed in REPLACED}
        assert named <= known, f"{page.name}: {named - known}"
