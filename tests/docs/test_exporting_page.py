"""docs/guides/exporting.md: its blocks make files, and the server says of each what the page says.

The packages are large: `make test-exporting` installs them, and the tests of a block are skipped without them.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
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


# Each file is named as its class.
_OF_ONE_ROW = """
import torch
from torch import nn
from torch.nn import functional

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True)
    def forward(self, x):
        return self.inner(x, x, x)[0]

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(16, 8, 2, batch_first=True, bidirectional=True), nn.GRU(16, 4, batch_first=True)
    def forward(self, x):
        return self.gru(self.lstm(x)[0])[0]

class ClassToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.dense = nn.Parameter(torch.randn(1, 1, 16)), nn.Linear(16, 4)
    def forward(self, x):
        return self.dense(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)[:, 0] + x.mean(1))

class ShuffledChannels(nn.Module):
    def forward(self, x):
        return x.view(x.shape[0], 2, 8, -1).transpose(1, 2).reshape(x.shape[0], 16, -1) * 2

class ChannelsLast(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)[..., None].permute(0, 2, 3, 1).mean([-1, -2], keepdim=True).flatten(1)

class Resized(nn.Module):
    def forward(self, x):
        return functional.interpolate(x[:, None], size=(10, 32), mode="bilinear")

class Grid(nn.Module):
    def __init__(self):
        super().__init__()
        self.grid = nn.Parameter(torch.rand(1, 4, 4, 2) * 2 - 1)
    def forward(self, x):
        return functional.grid_sample(x[:, None], self.grid.expand(x.shape[0], -1, -1, -1), align_corners=False)

for kind in (Attention, Recurrent, ClassToken, ShuffledChannels, ChannelsLast, Resized, Grid):
    torch.onnx.export(kind().eval(), (torch.randn(1, 16, 16),), f"{kind.__name__}.onnx", input_names=["x"])
    print(kind.__name__)
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif(not (CLIENTS / "torch").exists(), reason="make test-exporting installs torch")
def test_files_of_one_row_are_batched(tmp_path: Path) -> None:
    """By the default exporter, with an example of one row and nothing else."""
    python = CLIENTS / "torch" / "bin" / "python"
    run = partial(
        subprocess.run, cwd=tmp_path, capture_output=True, text=True, env=environment(), timeout=240
    )
    exported = run([python, "-c", _OF_ONE_ROW])
    assert exported.returncode == 0, exported.stderr
    files = list(tmp_path.glob("*.onnx"))
    assert len(files) == 7
    for file in files:
        done = run(command("inspect", str(file), "--fail-if-unbatched", "--no-measure"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "rewritten" in done.stdout


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
