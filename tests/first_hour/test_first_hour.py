from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from docs.pages import ROOT, Command
from first_hour import reader
from first_hour.__main__ import SECTION, installs, milestones, too_large
from first_hour.reader import Failed, Reader, without_this_environment
from first_hour.walk import KUBERNETES, README, TRITON, Milestone, Walk, find, find_dockerfile, of_own_model
from installs.image import Image

MEGABYTE = 1_000_000
# A server that ends with a traceback on Ctrl-C, without one, or not at all.
SERVER = """
import signal, sys
{first}
try:
    print("digits ready on 127.0.0.1:4242: a server", flush=True)
    while True:
        signal.pause()
except KeyboardInterrupt:
    {then}
"""


@pytest.fixture
def shell(tmp_path: Path) -> Reader:
    """A reader's shell in this checkout's place, without a clone."""
    return Reader(tmp_path, ROOT, without_this_environment(), None)


def written(text: str) -> Command:
    return Command("page.md", 12, text)


@pytest.fixture
def serve(tmp_path: Path) -> Callable[[str, str], Command]:
    def write(first: str, then: str) -> Command:
        program = tmp_path / "server.py"
        program.write_text(SERVER.format(first=first, then=then))
        return written(f"{shlex.quote(sys.executable)} {shlex.quote(str(program))}")

    return write


def test_the_environment_of_the_tests_is_not_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "TENSORFERRY_PORT", "PORT"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PIP_FIND_LINKS", "wheels")
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.prefix) / "bin"), "/usr/bin")))
    found = without_this_environment()
    assert found["PATH"] == "/usr/bin"
    assert found["PIP_FIND_LINKS"] == "wheels"
    assert not {"VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "TENSORFERRY_PORT", "PORT"} & set(
        found
    )


def test_a_clone_has_the_last_commit_and_nothing_else(tmp_path: Path) -> None:
    made = Reader.in_fresh_clone(tmp_path, None)
    assert (made.checkout / "README.md").is_file()
    assert not (made.checkout / ".venv").exists()
    heads = {
        subprocess.run(["git", "rev-parse", "HEAD"], cwd=place, capture_output=True, check=True).stdout
        for place in (ROOT, made.checkout)
    }
    assert len(heads) == 1
    made.run(written("git diff --quiet HEAD"))


def test_a_command_that_fails_is_named_with_its_page_and_its_output(shell: Reader) -> None:
    with pytest.raises(
        Failed, match=r"page.md:12: echo no such option; exit 2\nExit code 2; it printed:\nno such"
    ):
        shell.run(written("echo no such option; exit 2"))


def test_a_command_that_does_not_end_is_named(shell: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PATIENCE_SECONDS", 0.01)
    with pytest.raises(Failed, match=r"page.md:12: .*\nIt did not end in 0.01 s"):
        shell.run(written("sleep 100"))


def test_a_caller_uses_the_servers_address(shell: Reader) -> None:
    caller = shell.calling("127.0.0.1:4242")
    assert caller.adapted("tensorferry bench 127.0.0.1:8001 mine") == "tensorferry bench 127.0.0.1:4242 mine"
    caller.run(written('test "$TENSORFERRY_TARGET" = 127.0.0.1:4242'))


def test_an_activated_environment_comes_first(shell: Reader, tmp_path: Path) -> None:
    program = tmp_path / "made" / "bin" / "tensorferry"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert not shell.has("tensorferry")
    assert shell.activated(str(tmp_path / "made")).has("tensorferry")


def test_a_server_is_ended_with_ctrl_c(shell: Reader, serve: Callable[[str, str], Command]) -> None:
    with shell.running(serve("", "sys.exit(3)"), r"ready on \S+:(\d+):") as (found, seconds):
        assert found[1] == "4242"
        assert seconds > 0


def test_a_server_that_ends_early_is_named(shell: Reader) -> None:
    with (
        pytest.raises(Failed, match=r"page.md:12: echo no model\nIt ended without a line .*:\nno model"),
        shell.running(written("echo no model"), "ready on"),
    ):
        pass


def test_a_traceback_after_ctrl_c_fails(shell: Reader, serve: Callable[[str, str], Command]) -> None:
    with (
        pytest.raises(Failed, match="It ended with a traceback"),
        shell.running(serve("", "raise"), "ready on"),
    ):
        pass


def test_a_server_that_ignores_ctrl_c_fails(
    shell: Reader, serve: Callable[[str, str], Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_STOP_SECONDS", 0.05)
    with (
        pytest.raises(Failed, match=r"It did not end within 0.05 s of Ctrl-C"),
        shell.running(serve("signal.signal(signal.SIGINT, signal.SIG_IGN)", "pass"), "ready on"),
    ):
        pass


@pytest.mark.parametrize(
    ("page", "begins"),
    [
        (README, "make run"),
        (README, "pip install '.[cpu]'"),
        (README, "pip install ."),
        (README, "tensorferry serve"),
        (README, "tensorferry infer"),
        (README, "tensorferry bench"),
        (TRITON, "mkdir -p models"),
        (KUBERNETES, "docker build -f"),
        (KUBERNETES, "docker build -t"),
        (KUBERNETES, "docker run"),
    ],
)
def test_the_pages_have_the_commands_of_the_walk(shell: Reader, page: str, begins: str) -> None:
    assert find(shell, page, begins).text.startswith(begins)


def test_the_guide_has_the_build_file_of_a_models_image(shell: Reader) -> None:
    assert find_dockerfile(shell).text.startswith("# service/Dockerfile\nFROM ")


def test_a_page_without_a_command_of_the_walk_is_named(shell: Reader) -> None:
    with pytest.raises(Failed, match=r"README.md has no command that begins with: tensorferry fly"):
        find(shell, README, "tensorferry fly")


def test_a_reader_writes_another_model_for_the_demos() -> None:
    command = written("tensorferry infer digits --input image=examples/digits/images.npy")
    assert of_own_model(command).text == "tensorferry infer mine --input 'x=[[1,2,3,4,5,6,7,8]]'"
    assert of_own_model(written("tensorferry serve examples/digits/digits.onnx")).words[2] == "../mine.onnx"
    with pytest.raises(Failed, match=r"page.md:12: tensorferry models\nIt does not name the demo model"):
        of_own_model(written("tensorferry models"))


def test_a_container_runs_the_build_files_program() -> None:
    image = Image(ROOT, "deploy/docker/Dockerfile", "cpu")
    assert image.command[:2] == ["tensorferry", "serve"]
    assert "--model-repository=/models" in image.command


def walked(seconds: float, base: int) -> Walk:
    own = Milestone("own model", ("pip install", "serve"), seconds)
    report = Milestone("report", (*own.typed, "bench"), seconds + 20)
    sizes = {"": Counter({"numpy": base}), "[cpu]": Counter({"numpy": 2 * base})}
    return Walk((own, report), sizes)


def test_the_table_has_each_walk_and_no_line_twice() -> None:
    found = milestones({"first": walked(31.6, 1), "second": walked(12, 1)})
    assert found.splitlines()[2:] == [
        "| own model | `pip install`<br>`serve` | 2 | 32 | 12 |",
        "| report | as above, then<br>`bench` | 3 | 52 | 32 |",
    ]


def test_an_install_above_its_limit_is_named() -> None:
    assert too_large(walked(1, 100 * MEGABYTE)) == []
    assert too_large(walked(1, 121 * MEGABYTE)) == [
        "tensorferry takes 121.0 MB, more than 120 MB",
        "tensorferry[cpu] takes 242.0 MB, more than 230 MB",
    ]
    assert "| `tensorferry` | 100 | 120 | numpy 100 |" in installs(walked(1, 100 * MEGABYTE))


def test_the_page_has_a_section_for_the_results() -> None:
    page = (ROOT / "docs" / "results" / "measurements.md").read_text()
    assert "first report of a load test" in SECTION.of(page)
