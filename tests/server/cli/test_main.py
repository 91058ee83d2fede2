"""The command `tensorferry` runs its subcommands, and reports an unknown one."""

from __future__ import annotations

import io
import json
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest

from tensorferry.server import __main__ as command
from tensorferry.server.system import install_command as module_of_command
from tensorferry.server.system import installed_versions
from tensorferry.server.system.install_command import install_command


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each call of the subcommand `try`."""
    calls: list[Any] = []

    def run(argv: list[str]) -> int:
        calls.append(argv)
        return 7

    module = ModuleType("tried")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tried", module)
    monkeypatch.setitem(command._COMMANDS, "try", ("tried", "run", "a trial"))
    return calls


def test_a_subcommand_gets_the_other_arguments_and_its_exit_code_is_returned(called: list[Any]) -> None:
    assert command.main(["try", "--flag", "x"]) == 7
    assert called == [["--flag", "x"]]


def test_a_reader_that_has_gone_does_not_change_the_exit_code(
    called: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    discarded: list[bool] = []
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(command, "discard_output", lambda: discarded.append(True))
    assert command.main(["try"]) == 7
    assert discarded


@pytest.mark.parametrize("name", command._COMMANDS)
def test_every_subcommand_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: tensorferry {name}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["-V"], ["--version"], ["version"]])
def test_the_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(argv) == 0
    assert capsys.readouterr().out == f"tensorferry {metadata.version('tensorferry')}\n"


def test_help_lists_the_subcommands_or_describes_one(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["help"], ["-h"], ["--help"]):
        assert command.main(argv) == 0
        out, err = capsys.readouterr()
        assert out.startswith("usage: tensorferry [--version] COMMAND")
        assert err == ""
        for name, (_, _, description) in command._COMMANDS.items():
            assert f"  {name:<10}{description}\n" in out
    with pytest.raises(SystemExit, match="0"):
        command.main(["help", "ready"])
    assert capsys.readouterr().out.startswith("usage: tensorferry ready")
    assert command.main(["help", "rady"]) == 2
    assert "unknown command 'rady'; did you mean ready?" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "message"), [([], "usage:"), (["fly"], "unknown command 'fly'\nusage:")])
def test_an_unknown_subcommand_is_an_error(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)


def test_a_missing_package_is_reported_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command._COMMANDS, "try", ("no_such_package.at_all", "run", ""))
    assert command.main(["try"]) == 1
    expected = f"tensorferry try: the package no_such_package is missing; {install_command('cpu')}"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (None, "pip install 'tensorferry[gpu]'"),
        ("https://example.com/tensorferry.whl", "pip install 'tensorferry[gpu]'"),
        ("file:///home/a%20b/tensorferry", "pip install '/home/a b/tensorferry[gpu]'"),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(
    url: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            return None if url is None else json.dumps({"url": url, "dir_info": {}})

    monkeypatch.setattr(module_of_command, "distribution", lambda name: Installed())
    assert install_command("gpu") == expected


@pytest.mark.parametrize(("version", "works"), [("4.25.8", False), ("5.29", True)])
def test_a_package_of_a_wrong_version_is_reported_with_what_to_install(
    version: str, works: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> ModuleType:
        raise ImportError("cannot import name 'runtime_version' from 'google.protobuf'")

    needed = ["protobuf<8,>=5.29", "numpy>=1.26", 'no-such-package>=3; extra == "cpu"']
    monkeypatch.setattr(metadata, "requires", lambda name: needed)
    known = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "protobuf" else known(name))
    monkeypatch.setattr(installed_versions, "import_module", refuse)
    if works:
        with pytest.raises(ImportError):
            command.main(["serve"])
        return
    assert command.main(["serve"]) == 1
    assert capsys.readouterr().err == (
        f"tensorferry serve: protobuf {version} is installed, which does not work: pip install 'protobuf<8,>=5.29'\n"
    )


def test_a_missing_module_of_tensorferry_is_a_bug_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command._COMMANDS, "try", ("tensorferry.server.no_such_module", "run", ""))
    with pytest.raises(ModuleNotFoundError):
        command.main(["try"])
