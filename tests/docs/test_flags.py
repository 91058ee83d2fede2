"""The flags that README and docs name exist, README names all of `serve`, and their defaults are the code's."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from docs.pages import ROOT, pages

from tensorferry.client.cli import commands, top
from tensorferry.server.cli import make_token, show_config
from tensorferry.server.cli.serve import _parser
from tensorferry.server.config.flags import read_flags
from tensorferry.server.config.load import load_config
from tensorferry.server.config.options import OPTIONS
from tensorferry.server.config.server_config import ServerConfig

# Of other programs, and of what is run with Python or make in this repository.
OTHERS = frozenset({
    "--apart", "--cap-drop", "--concurrency-range", "--docs", "--enable-feature", "--go", "--go-grpc", "--grpc-java",
    "--java", "--keep", "--load", "--loads", "--minutes", "--only", "--percentile", "--plugin", "--read-only",
    "--results", "--rounds", "--seconds", "--shape", "--spare-core", "--tmpfs",
})  # fmt: skip
SERVE = {f"--{option.flag}" for option in OPTIONS}
ROWS = re.findall(r"^\| (`--.+?) \| (.+?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
# A row may have several flags, with a default for each. What is not in backticks is prose, such as "none".
DEFAULTS = [
    (flag, cell.strip("`"))
    for flags, cells in ROWS
    for flag, cell in zip(re.findall(r"`(--[\w-]+)`", flags), cells.split(", "), strict=False)
    if cell.startswith("`")
]


def flags_of_other_commands() -> set[str]:
    found: set[str] = set()
    for command in (
        commands.infer,
        commands.models,
        commands.describe,
        commands.ready,
        top.main,
        show_config.main,
        make_token.main,
    ):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
            command(["--help"])
        found.update(re.findall(r"--[a-z][\w-]+", printed.getvalue()))
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_flags_of_a_page_exist(page: Path) -> None:
    if page.name == "from_triton.md":
        # It names Triton's in its first column, and ours behind.
        text = "\n".join(re.sub(r"^\|[^|]*\|", "|", line) for line in page.read_text().splitlines())
    else:
        text = page.read_text()
    # protoc's have underscores.
    named = {flag for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", text) if "_" not in flag}
    switches = {flag.replace("--", "--no-", 1) for flag in SERVE}
    assert named <= SERVE | switches | {"--config"} | flags_of_other_commands() | OTHERS


def test_readme_names_every_flag_of_serve() -> None:
    named = {flag for flags, _ in ROWS for flag in re.findall(r"`(--[\w-]+)`", flags)}
    assert named - {"--config"} == SERVE


def configured(*flags: str) -> ServerConfig:
    _, texts = read_flags(_parser(), ["m.onnx", *flags], OPTIONS)
    return load_config(["m.onnx"], texts, {}, None)


@pytest.mark.parametrize(("flag", "default"), DEFAULTS)
def test_readme_has_the_defaults(flag: str, default: str) -> None:
    assert configured(f"{flag}={default}") == configured()


def test_the_defaults_were_found() -> None:
    assert len(DEFAULTS) > 40
