"""README and docs: each command and each block of Python is run, or checked, or listed with a reason."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from docs import not_run
from docs.conftest import Place, serving
from docs.pages import ROOT, Block, Command, is_shell
from docs.running import BLOCKS, COMMANDS, PARTS, PYTHON, follow, parts, reason

from tensorferry.client import InferenceClient, InferenceError

# These pages have their own tests, with their own servers.
WITH_OWN_SERVER = (
    "docs/guides/applications.md", "docs/guides/exporting.md", "docs/guides/from_python_servers.md",
    "docs/guides/http.md", "docs/guides/image_classification.md", "docs/guides/kubernetes.md",
    "docs/guides/python_models.md", "docs/guides/security.md", "docs/guides/sequences.md",
    "docs/guides/tables.md", "docs/guides/text_embeddings.md", "docs/reference/repository.md",
)  # fmt: skip
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.mark.parametrize(
    "part", [part for part in PARTS if part.page not in WITH_OWN_SERVER], ids=lambda part: part.place
)
def test_part(part: Command | Block, place: Place) -> None:
    follow(part, place)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_security_page(place: Place) -> None:
    """Make certificates and tokens, start a server with them, and call it."""
    page = [part for part in parts("docs/guides/security.md") if not reason(part)]
    commands = [part for part in page if isinstance(part, Command)]
    served = [c for c in commands if c.words[:2] == ["tensorferry", "serve"]]
    calls = [c for c in commands if c.words[:2] == ["tensorferry", "models"] or c.words[0] == "grpcurl"]
    for command in commands:
        if command not in calls:
            follow(command, place)
    with_tokens = next(c for c in served if "--auth-tokens" in c.words)
    with serving(place.directory, *with_tokens.words[2:]) as other:
        for part in page:
            if isinstance(part, Block) or (part in calls and place.has(part.words[0])):
                follow(part, other)


def test_the_repository_page(place: Place) -> None:
    with serving(place.directory, "--model-repository", "models", "--model-control", "explicit") as other:
        for part in parts("docs/reference/repository.md"):
            follow(part, other)


def test_the_page_of_sequences(place: Place) -> None:
    install, model, *others = parts("docs/guides/sequences.md")
    follow(install, place)
    follow(model, place)
    with serving(place.directory, "level.onnx", "--state", "past=next") as other:
        for part in others:
            follow(part, other)


def test_the_page_of_http(place: Place) -> None:
    with serving(place.directory, "examples/digits/digits.onnx", "examples/generator/app.py") as other:
        for part in parts("docs/guides/http.md"):
            follow(part, other)


def test_the_page_of_other_python_servers(place: Place) -> None:
    app, serve, *calls = parts("docs/guides/from_python_servers.md")
    (place.directory / "app.py").write_text(app.text)
    follow(serve, place)
    with serving(place.directory, "app.py") as other:
        for call in calls:
            follow(call, other)


def test_the_page_of_python_models(place: Place) -> None:
    """Serve the app of the page's blocks, run its commands, and call its models."""
    page = parts("docs/guides/python_models.md")
    app = [part for part in page if part.text.startswith("# app.py\n")]
    (place.directory / "app.py").write_text("\n\n".join(part.text for part in app))
    images = np.load(ROOT / "examples" / "digits" / "images.npy")
    with serving(place.directory, "app.py") as other, InferenceClient(other.server.address) as client:
        for part in page:
            if part not in app:
                follow(part, other)
        with InferenceClient(place.server.address) as digits:
            labels = digits.infer("digits", {"image": images})["label"]
        words = client.infer("read", {"picture": 16 - images})["word"]
        assert [DIGITS.index(word.decode()) for word in words] == labels.tolist()
        assert set(client.infer("careful", {"picture": 16 - images})["sure"]) <= {*words, b"unsure"}
        with pytest.raises(InferenceError, match="the greatest pixel is 17; pixels are 0 to 16"):
            client.infer("read", {"picture": np.full_like(images, 17)})
        assert client.infer("Distance", {"image": images})["distance"].shape == (len(images),)


def test_the_page_of_tables(place: Place) -> None:
    """Serve the example, and run the page's commands and blocks; skl2onnx is not installed for the first one."""
    with serving(place.directory, "examples/table/rents.onnx") as other:
        for part in parts("docs/guides/tables.md"):
            if part.text.startswith("from skl2onnx"):
                written = (ROOT / "examples" / "table" / "train.py").read_text()
                assert all(line.strip() in written for line in part.text.splitlines())
            else:
                follow(part, other)
        with InferenceClient(other.server.address) as client:
            assert client.metadata("rents").properties["batching_verdict"] == "proved"


def test_every_other_block_is_listed_as_no_command() -> None:
    """A command's program is in pages.py; another block is in not_run.OTHERS."""
    others = [block for block in BLOCKS if not block.fenced and not is_shell(block)]
    assert not [b for b in others if not b.text.startswith(not_run.OTHERS.get(b.page, ()))]


def test_everything_that_is_listed_as_not_run_exists() -> None:
    for page, all_begin in not_run.COMMANDS.items():
        for begins in all_begin:
            assert any(c.page == page and c.text.startswith(begins) for c in COMMANDS), (page, begins)
    for page, all_begin in not_run.PYTHON.items():
        for begins in all_begin:
            assert any(b.page == page and begins in b.text for b in PYTHON), (page, begins)
    for page, others in not_run.OTHERS.items():
        for begins in others:
            assert any(b.page == page and b.text.startswith(begins) for b in BLOCKS), (page, begins)
