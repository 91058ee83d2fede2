"""docs/guides/exporting.md: its blocks make files, and the server says of each what the page says.

The packages are large: `make test-exporting` installs them, and the tests of a block are skipped without them.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from docs.pages import Block, blocks
from support.processes.server import ServerProcess, command, environment
from support.wire.programs import CLIENTS

from tensorferry.client import InferenceClient

PAGE = "docs/guides/exporting.md"
_TREES = re.compile(r"^(from|import) (sklearn|lightgbm|xgboost)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Export:
    """A block that writes a file, and what the server's log says of it; None if requests share batches."""

    block: Block
    file: str
    log: str | None

    @property
    def python(self) -> Path:
        """The interpreter that has the block's packages."""
        name = "exporters" if _TREES.search(self.block.text) else "torch"
        return CLIENTS / name / "bin" / "python"


def exports() -> Iterator[Export]:
    """Yield the page's blocks of Python, each with the block of the log that follows it."""
    page = [block for block in blocks() if block.page == PAGE and block.fenced]
    for block, following in zip(page, [*page[1:], None], strict=True):
        if block.language == "python":
            *_, file = re.findall(r'"(\w+\.onnx)"', block.text)
            log = following.text if following is not None and following.language == "text" else None
            yield Export(block, file, log)


EXPORTS = list(exports())


_ENCODER = """
import sys
from transformers import BertConfig, BertModel

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BertModel(BertConfig(vocab_size=40, **sizes)).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory, but for a small encoder in place of the one that the page fetches from the hub."""
    folder = tmp_path_factory.mktemp("exported")
    python = CLIENTS / "torch" / "bin" / "python"
    if python.exists():
        encoder = folder / "sentence-transformers" / "all-MiniLM-L6-v2"
        subprocess.run(
            [python, "-c", _ENCODER, encoder], check=True, capture_output=True, env=environment(), timeout=240
        )
    return folder


def test_the_page_has_files_that_batch_and_files_that_do_not() -> None:
    assert len({export.file for export in EXPORTS}) == len(EXPORTS) > 10
    assert len([export for export in EXPORTS if export.log is None]) >= 6
    assert len([export for export in EXPORTS if export.log is not None]) >= 6


@pytest.mark.timeout(300)
@pytest.mark.parametrize("export", EXPORTS, ids=lambda export: export.file)
def test_a_file_is_served_as_the_page_says(export: Export, folder: Path) -> None:
    if not export.python.exists():
        pytest.skip(f"needs {export.python.parents[1].name}: make test-exporting installs it")
    done = subprocess.run(
        [export.python, "-c", export.block.text],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    model = folder / export.file
    if export.log is not None:
        assert export.log.strip() in log_of(model)
        return
    server = ServerProcess.start(model, transport="lane")
    with InferenceClient(server.address) as client:
        assert client.metadata(model.stem).properties["batching_verdict"] == "proved", server.log
    assert server.stop() == 0, server.log


def log_of(model: Path) -> str:
    """Return what `tensorferry serve` writes about a model until it is ready, or ends."""
    try:
        server = ServerProcess.start(model, transport="lane")
    except AssertionError as error:
        return str(error)
    server.stop()
    return "".join(server.log)


@pytest.mark.skipif(not (CLIENTS / "torch").exists(), reason="make test-exporting installs torch")
def test_inspect_as_the_page_calls_it(folder: Path) -> None:
    """The first block has written the file."""
    done = subprocess.run(
        command("inspect", "net.onnx"),
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "PROVED" in done.stdout
