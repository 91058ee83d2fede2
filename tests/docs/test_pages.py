"""README and docs: each command and each block of Python is run, or checked, or listed with a reason."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from docs import not_run
from docs.conftest import Place
from docs.pages import ROOT, Block, Command, is_shell
from docs.running import BLOCKS, COMMANDS, PYTHON, check_serve, execute, follow, reason, run

from tensorferry.client import InferenceClient, InferenceError

# These pages have their own tests below, with their own servers.
WITH_OWN_SERVER = (
    "docs/guides/applications.md", "docs/guides/exporting.md", "docs/guides/image_classification.md", "docs/guides/kubernetes.md",
    "docs/guides/python_models.md", "docs/guides/security.md", "docs/guides/sequences.md",
    "docs/guides/tables.md", "docs/guides/text_embeddings.md", "docs/reference/repository.md",
)  # fmt: skip
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.page not in WITH_OWN_SERVER], ids=str)
def test_command(command: Command, place: Place) -> None:
    if reason(not_run.COMMANDS, command.page, command.text):
        return
    if command.words[:2] == ["tensorferry", "top"] and "--once" not in command.words:
        check_top(command)
    else:
        follow(command, place)


def check_top(command: Command) -> None:
    """Check that the page also has the command with --once: without it, the command runs until q is pressed."""
    assert any(other.words[:2] == ["tensorferry", "top"] and "--once" in other.words for other in COMMANDS), (
        command
    )


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


def test_the_page_of_sequences(place: Place) -> None:
    page = "docs/guides/sequences.md"
    model, client = (block for block in PYTHON if block.page == page)
    execute(model, place)
    other = place.with_server("level.onnx", "--state", "past=next")
    execute(client, other)
    for command in COMMANDS:
        if command.page == page and not reason(not_run.COMMANDS, page, command.text):
            follow(command, other)
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


def test_every_other_block_is_listed_as_no_command() -> None:
    """A command's program is in pages.py; another block is in not_run.OTHERS."""
    others = [block for block in BLOCKS if not block.fenced and not is_shell(block)]
    listed = not_run.OTHERS
    unknown = [
        b for b in others if not any(b.page == page and b.text.startswith(text) for page, text in listed)
    ]
    assert not unknown


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
