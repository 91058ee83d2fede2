"""Smoke test of `make first-hour`, which takes minutes and the network: its pages and its shell."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs.pages import ROOT, Command
from first_hour.__main__ import SECTION
from first_hour.reader import Failed, Reader
from first_hour.walk import KUBERNETES, README, TRITON, find, find_dockerfile, of_own_model

SERVER = "echo digits ready on 127.0.0.1:4242; exec sleep 100"
WALKED = {
    README: [
        "make run", "pip install '.[cpu]'", "pip install .", "tensorferry serve", "tensorferry infer", "tensorferry bench",
    ],
    TRITON: ["mkdir -p models"],
    KUBERNETES: ["docker build -f", "docker build -t", "docker run"],
}  # fmt: skip


def test_the_pages_have_the_commands_of_the_walk_and_its_section(tmp_path: Path) -> None:
    shell = Reader.in_fresh_clone(tmp_path, None)
    for page, begins in WALKED.items():
        for text in begins:
            assert find(shell, page, text).text.startswith(text)
    assert of_own_model(find(shell, README, "tensorferry serve")).words[2] == "../mine.onnx"
    assert find_dockerfile(shell).text.startswith("# service/Dockerfile\nFROM ")
    assert "first report of a load test" in SECTION.of((ROOT / "docs/results/measurements.md").read_text())


def test_a_command_that_fails_is_named_and_a_server_is_ended_with_ctrl_c(tmp_path: Path) -> None:
    shell = Reader.in_fresh_clone(tmp_path, None)
    with pytest.raises(Failed, match=r"page.md:12: echo no; exit 2\nExit code 2; it printed:\nno"):
        shell.run(Command("page.md", 12, "echo no; exit 2"))
    with shell.running(Command("page.md", 12, SERVER), r"ready on \S+:(\d+)") as (found, _):
        assert found[1] == "4242"
