"""README and docs: each command and each block of Python is run, or checked as far as it can be, or listed with a reason."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from docs import not_run
from docs.conftest import Place
from docs.pages import ROOT, Block, Command, blocks, commands, expected_output, is_shell

from tensorferry.server.cli.serve import _parser
from tensorferry.server.config.flags import read_flags
from tensorferry.server.config.load import load_config
from tensorferry.server.config.server_config import OPTIONS

BLOCKS = list(blocks())
COMMANDS = [command for block in BLOCKS if is_shell(block) for command in commands(block)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
# These pages speak of a server of their own: see below.
APART = ("docs/guides/security.md", "docs/reference/repository.md")
PATIENCE = 60


def reason(of: Mapping[tuple[str, str], str], page: str, text: str) -> str | None:
    """Why something is not run; None for what is."""
    for (where, begins), why in of.items():
        if where == page and any(line.startswith(begins) for line in text.splitlines()):
            return why
    return None


def run(command: Command, place: Place) -> None:
    """Runs a command as it is written, but for the ports."""
    ended = subprocess.run(
        place.adapted(command.text),
        shell=True,
        cwd=place.directory,
        env=dict(place.variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"


def check_serve(command: Command, directory: Path) -> None:
    """Its flags are known and have good values, and the models that it names are there."""
    arguments, flags = read_flags(_parser(), command.words[2:], OPTIONS)
    config = load_config(arguments["models"], flags, {}, None)
    for source in config.models:
        # text.onnx stands for a model of the reader.
        if (command.page, source.path.name) != ("docs/guides/serving.md", "text.onnx"):
            assert (directory / source.path).is_file(), command
    for repository in config.model_repositories:
        assert (directory / repository).is_dir(), command


def check_make(command: Command) -> None:
    """The Makefile has the targets and reads the variables."""
    makefile = (ROOT / "Makefile").read_text()
    for word in command.words[1:]:
        name, equals, _ = word.partition("=")
        pattern = rf"\$\({re.escape(name)}\)" if equals else rf"^{re.escape(name)}:"
        assert re.search(pattern, makefile, re.MULTILINE), command


def check_pip(command: Command) -> None:
    """The extras exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for group in re.findall(r"\[([\w,]+)\]", command.text):
        assert set(group.split(",")) <= set(extras), command


def check_files(command: Command) -> None:
    """The files that it names are in the repository."""
    named = [word for word in command.words if word.startswith("deploy/")]
    assert named, command
    for word in named:
        assert (ROOT / word).exists(), command


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.page not in APART], ids=str)
def test_command(command: Command, place: Place) -> None:
    if reason(not_run.COMMANDS, command.page, command.text):
        return
    words = command.words
    match words:
        case ["tensorferry", "serve", *_]:
            check_serve(command, place.directory)
        case ["make", *_]:
            check_make(command)
        case ["pip", *_]:
            check_pip(command)
        case ["docker" | "kubectl" | "promtool", *_]:
            check_files(command)
        case ["grpcurl" | "curl", *_] if not shutil.which(words[0]):
            pytest.skip(f"needs {words[0]}")
        case ["tensorferry", "top", *_] if "--once" not in words:
            check_top(command)
        case _:
            run(command, place)


def check_top(command: Command) -> None:
    """It would go on until q is pressed: the next of its lines is run."""
    assert any(other.words[:2] == ["tensorferry", "top"] and "--once" in other.words for other in COMMANDS), (
        command
    )


@contextlib.contextmanager
def standing_in(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def execute(block: Block, place: Place) -> None:
    """Runs a block of Python, which prints what its comments say."""
    printed = io.StringIO()
    with standing_in(place.directory), contextlib.redirect_stdout(printed):
        names: dict[str, Any] = {"__name__": block.place}
        exec(compile(place.adapted(block.text), block.place, "exec"), names)
        for value in list(names.values()):
            # A client that a snippet leaves open.
            close = getattr(value, "close", None)
            if close is not None and not isinstance(value, type) and hasattr(value, "infer"):
                close()
    expected = expected_output(block.text)
    if expected:
        assert printed.getvalue().splitlines() == expected, block.place


@pytest.mark.parametrize("block", [b for b in PYTHON if b.page not in APART], ids=lambda block: block.place)
def test_python(block: Block, place: Place) -> None:
    if not reason(not_run.PYTHON, block.page, block.text):
        execute(block, place)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_page_on_security(place: Place) -> None:
    """Certificates and tokens are made, a server is started with them, and called."""
    page = [
        c
        for c in COMMANDS
        if c.page == "docs/guides/security.md" and not reason(not_run.COMMANDS, c.page, c.text)
    ]
    served = [c for c in page if c.words[:2] == ["tensorferry", "serve"]]
    calls = [c for c in page if c.words[:2] == ["tensorferry", "models"] or c.words[0] == "grpcurl"]
    for command in page:
        if command not in served and command not in calls:
            run(command, place)
    for command in served:
        check_serve(command, place.directory)
    with_tokens = next(c for c in served if "--auth-tokens" in c.words)
    apart = place.arrange(*with_tokens.words[2:])
    for command in calls:
        if shutil.which(command.words[0]) or command.words[0] == "tensorferry":
            run(command, apart)
    for block in PYTHON:
        if block.page == "docs/guides/security.md":
            execute(block, apart)
    assert apart.server.stop() == 0, apart.server.log


def test_the_page_on_repositories(place: Place) -> None:
    page = [c for c in COMMANDS if c.page == "docs/reference/repository.md"]
    for command in page:
        check_serve(command, place.directory)
    apart = place.arrange("--model-repository", "models", "--model-control", "explicit")
    for block in PYTHON:
        if block.page == "docs/reference/repository.md":
            execute(block, apart)
    assert apart.server.stop() == 0, apart.server.log


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if not b.fenced and not is_shell(b)], ids=lambda block: block.place
)
def test_each_other_block_is_known_to_be_no_command(block: Block) -> None:
    assert any(block.page == page and block.text.startswith(begins) for page, begins in not_run.OTHERS), (
        f"{block.place}: is this a command? Name its program in pages.py, or the block in not_run.OTHERS:\n{block.text}"
    )


def test_what_is_not_run_is_still_there() -> None:
    for page, begins in not_run.COMMANDS:
        assert any(c.page == page and c.text.startswith(begins) for c in COMMANDS), (page, begins)
    for page, begins in not_run.PYTHON:
        assert any(b.page == page and begins in b.text for b in PYTHON), (page, begins)
    for page, begins in not_run.OTHERS:
        assert any(b.page == page and b.text.startswith(begins) for b in BLOCKS), (page, begins)
