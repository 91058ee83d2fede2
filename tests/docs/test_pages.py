"""README and docs: each command and each block of Python is run, or checked, or listed with a reason."""

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

import numpy as np
import pytest
from docs import not_run
from docs.conftest import Place
from docs.pages import ROOT, Block, Command, blocks, commands, expected_output, is_shell

from tensorferry.client import InferenceClient, InferenceError
from tensorferry.server.config.flags import read_flags
from tensorferry.server.config.load import load_config
from tensorferry.server.config.server_config import OPTIONS
from tensorferry.server.startup import command_parser

BLOCKS = list(blocks())
COMMANDS = [command for block in BLOCKS if is_shell(block) for command in commands(block)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
# These pages have their own tests below, with their own servers.
WITH_OWN_SERVER = (
    "docs/guides/exporting.md",
    "docs/guides/kubernetes.md",
    "docs/guides/python_models.md",
    "docs/guides/security.md",
    "docs/guides/tables.md",
    "docs/reference/repository.md",
)
PATIENCE = 60
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def reason(reasons: Mapping[tuple[str, str], str], page: str, text: str) -> str | None:
    """Return why a command or block is not run; None if it is run."""
    for (listed_page, beginning), why in reasons.items():
        if listed_page == page and any(line.startswith(beginning) for line in text.splitlines()):
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


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.page not in WITH_OWN_SERVER], ids=str)
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
        case ["docker" | "helm" | "kubectl" | "promtool", *_]:
            check_files(command)
        case ["grpcurl" | "curl", *_] if not place.has(words[0]):
            assert words[0] != "grpcurl" or "CI" not in os.environ, "make tools installs grpcurl"
            pytest.skip(f"needs {words[0]}")
        case ["tensorferry", "top", *_] if "--once" not in words:
            check_top(command)
        case _:
            run(command, place)


def check_top(command: Command) -> None:
    """Check that the page also has the command with --once: without it, the command runs until q is pressed."""
    assert any(other.words[:2] == ["tensorferry", "top"] and "--once" in other.words for other in COMMANDS), (
        command
    )


@contextlib.contextmanager
def working_directory(directory: Path) -> Iterator[None]:
    previous = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(previous)


def execute(block: Block, place: Place) -> None:
    """Run a block of Python and compare its output with its comments."""
    printed = io.StringIO()
    with working_directory(place.directory), contextlib.redirect_stdout(printed):
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


@pytest.mark.parametrize(
    "block", [b for b in PYTHON if b.page not in WITH_OWN_SERVER], ids=lambda block: block.place
)
def test_python(block: Block, place: Place) -> None:
    if not reason(not_run.PYTHON, block.page, block.text):
        execute(block, place)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_security_page(place: Place) -> None:
    """Make certificates and tokens, start a server with them, and call it."""
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
    other = place.with_server(*with_tokens.words[2:])
    for command in calls:
        if place.has(command.words[0]):
            run(command, other)
    for block in PYTHON:
        if block.page == "docs/guides/security.md":
            execute(block, other)
    assert other.server.stop() == 0, other.server.log


def test_the_repository_page(place: Place) -> None:
    page = [c for c in COMMANDS if c.page == "docs/reference/repository.md"]
    for command in page:
        check_serve(command, place.directory)
    other = place.with_server("--model-repository", "models", "--model-control", "explicit")
    for block in PYTHON:
        if block.page == "docs/reference/repository.md":
            execute(block, other)
    assert other.server.stop() == 0, other.server.log


def test_the_page_of_python_models(place: Place) -> None:
    """Serve the app of the page's blocks, run its commands, and call its models."""
    page = "docs/guides/python_models.md"
    app = [b.text for b in PYTHON if b.page == page and b.text.startswith("# app.py\n")]
    (place.directory / "app.py").write_text("\n\n".join(app))
    other = place.with_server("app.py")
    for command in COMMANDS:
        if command.page == page and command.words[:2] == ["tensorferry", "serve"]:
            check_serve(command, place.directory)
        elif command.page == page:
            run(command, other)
    for block in PYTHON:
        if block.page == page and not block.text.startswith("# app.py\n"):
            execute(block, other)
    images = np.load(ROOT / "examples" / "digits" / "images.npy")
    with InferenceClient(other.server.address) as client, InferenceClient(place.server.address) as digits:
        labels = digits.infer("digits", {"image": images})["label"]
        words = client.infer("read", {"picture": 16 - images})["word"]
        assert [DIGITS.index(word.decode()) for word in words] == labels.tolist()
        assert set(client.infer("careful", {"picture": 16 - images})["sure"]) <= {*words, b"unsure"}
        with pytest.raises(InferenceError, match="the greatest pixel is 17; pixels are 0 to 16"):
            client.infer("read", {"picture": np.full_like(images, 17)})
        assert client.infer("Distance", {"image": images})["distance"].shape == (len(images),)
    assert other.server.stop() == 0, other.server.log


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if not b.fenced and not is_shell(b)], ids=lambda block: block.place
)
def test_every_other_block_is_listed_as_no_command(block: Block) -> None:
    assert any(block.page == page and block.text.startswith(begins) for page, begins in not_run.OTHERS), (
        f"{block.place}: if this is a command, add its program to pages.py, otherwise add the block to not_run.OTHERS:\n{block.text}"
    )


def test_everything_that_is_listed_as_not_run_exists() -> None:
    for page, begins in not_run.COMMANDS:
        assert any(c.page == page and c.text.startswith(begins) for c in COMMANDS), (page, begins)
    for page, begins in not_run.PYTHON:
        assert any(b.page == page and begins in b.text for b in PYTHON), (page, begins)
    for page, begins in not_run.OTHERS:
        assert any(b.page == page and b.text.startswith(begins) for b in BLOCKS), (page, begins)


def test_the_page_of_tables(place: Place) -> None:
    """Serve the example, and run the page's commands and blocks; skl2onnx is not installed for the first one."""
    page = "docs/guides/tables.md"
    other = place.with_server("examples/table/rents.onnx")
    for command in COMMANDS:
        if command.page == page and command.words[:2] == ["tensorferry", "serve"]:
            check_serve(command, place.directory)
        elif command.page == page:
            run(command, other)
    for block in PYTHON:
        if block.page == page:
            if block.text.startswith("from skl2onnx"):
                written = (ROOT / "examples" / "table" / "train.py").read_text()
                assert all(line.strip() in written for line in block.text.splitlines())
            else:
                execute(block, other)
    with InferenceClient(other.server.address) as client:
        assert client.metadata("rents").properties["batching_verdict"] == "proved"
    assert other.server.stop() == 0, other.server.log
