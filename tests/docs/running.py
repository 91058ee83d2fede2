"""Runs the commands and the Python of pages against a server."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from docs import not_run
from docs.conftest import Place
from docs.pages import ROOT, Block, Command, blocks, commands, expected_output, is_shell

from tensorferry.server.config.flags import read_flags
from tensorferry.server.config.load import load_config
from tensorferry.server.config.server_config import OPTIONS
from tensorferry.server.startup import command_parser

BLOCKS = list(blocks())
COMMANDS = [command for block in BLOCKS if is_shell(block) for command in commands(block)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
PARTS: list[Command | Block] = [*COMMANDS, *PYTHON]
PATIENCE = 60


def parts(page: str) -> list[Command | Block]:
    """Return the commands and the Python blocks of a page, in their order."""
    return sorted((part for part in PARTS if part.page == page), key=lambda part: part.line)


def reason(part: Command | Block) -> str | None:
    """Return why a command or block is not run; None if it is run."""
    reasons = not_run.PYTHON if isinstance(part, Block) else not_run.COMMANDS
    for beginning, why in reasons.get(part.page, {}).items():
        if any(line.startswith(beginning) for line in part.text.splitlines()):
            return why
    return None


def run(command: Command, place: Place) -> None:
    """Run a command as written, except for the ports."""
    process = subprocess.run(
        place.adapted(command.text),
        shell=True,
        cwd=place.directory,
        env=dict(place.variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert process.returncode == 0, f"{command}\n{process.stdout}{process.stderr}"


def check_serve(command: Command, directory: Path) -> None:
    """Check that the flags and their values are valid, and that the models exist."""
    arguments, flags = read_flags(command_parser(), command.words[2:], OPTIONS)
    config = load_config(arguments["models"], flags, {}, None)
    for source in config.models:
        # text.onnx stands for a model of the reader.
        if (command.page, source.path.name) != ("docs/guides/serving.md", "text.onnx"):
            # No test uses the public network.
            assert source.origin is not None or (directory / source.path).is_file(), command
    for repository in config.model_repositories:
        assert not isinstance(repository, Path) or (directory / repository).is_dir(), command


def check_make(command: Command) -> None:
    """Check that the Makefile has the targets and uses the variables."""
    makefile = (ROOT / "Makefile").read_text()
    for word in command.words[1:]:
        name, equals, _ = word.partition("=")
        pattern = rf"\$\({re.escape(name)}\)" if equals else rf"^{re.escape(name)}:"
        assert re.search(pattern, makefile, re.MULTILINE), command


def check_pip(command: Command) -> None:
    """Check that the extras exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for group in re.findall(r"\[([\w,]+)\]", command.text):
        assert set(group.split(",")) <= set(extras), command


def check_files(command: Command) -> None:
    """Check that the files of deploy/ exist."""
    named = [word for word in command.words if word.startswith("deploy/")]
    assert named, command
    for word in named:
        assert (ROOT / word).exists(), command


def check_top(command: Command) -> None:
    """Check that the page also has the command with --once: without it, the command runs until q is pressed."""
    assert any(other.words[:2] == ["tensorferry", "top"] and "--once" in other.words for other in COMMANDS), (
        command
    )


def follow(part: Command | Block, place: Place) -> None:
    """Run a block or a command that is not listed as not run.

    A command is checked instead if running it would serve, install or need other machines.
    """
    if reason(part):
        return
    if isinstance(part, Block):
        execute(part, place)
        return
    command, words = part, part.words
    match words:
        case ["tensorferry", "top", *_] if "--once" not in words:
            check_top(command)
        case ["tensorferry", "serve", *_]:
            check_serve(command, place.directory)
        case ["make", *_]:
            check_make(command)
        case ["pip", *_]:
            check_pip(command)
        case ["docker" | "helm" | "kubectl" | "promtool", *_]:
            check_files(command)
        case ["grpcurl" | "curl", *_] if not place.has(words[0]):
            assert words[0] != "grpcurl" or "CI" not in os.environ, "make tools installs grpcurl"
            pytest.skip(f"needs {words[0]}")
        case _:
            run(command, place)


def execute(block: Block, place: Place) -> None:
    """Run a block of Python and compare its output with its comments."""
    printed = io.StringIO()
    with contextlib.chdir(place.directory), contextlib.redirect_stdout(printed):
        names: dict[str, Any] = {"__name__": block.place}
        exec(compile(place.adapted(block.text), block.place, "exec"), names)
        for value in list(names.values()):
            # Close a client that the block leaves open.
            close = getattr(value, "close", None)
            if close is not None and not isinstance(value, type) and hasattr(value, "infer"):
                close()
    expected = expected_output(block.text)
    if expected:
        assert printed.getvalue().splitlines() == expected, block.place
