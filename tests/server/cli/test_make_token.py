"""`tensorferry token`: its output, and the file that it appends to."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from tensorferry.server.cli.make_token import main
from tensorferry.server.identity import ClientIdentity
from tensorferry.server.security.credential_files import read_tokens


def test_the_token_and_its_line_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["alice", "--roles", "control,infer"]) == 0
    first, second = (line.partition(": ")[2].strip() for line in capsys.readouterr().out.splitlines())
    assert first not in second
    path = tmp_path / "tokens"
    path.write_text(second)
    digest = hashlib.sha256(first.encode()).hexdigest()
    assert read_tokens(path) == {digest: ClientIdentity("alice", frozenset({"infer", "control"}))}


def test_tokens_are_unique_and_random_and_only_their_hashes_are_stored(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "tokens"
    for _ in range(20):
        assert main(["a", "--file", str(path)]) == 0
    tokens = capsys.readouterr().out.split()
    assert len(set(tokens)) == 20
    # 32 random bytes in base64.
    assert all(len(token.removeprefix("tensorferry_")) == 43 for token in tokens)
    assert set(read_tokens(path)) == {hashlib.sha256(token.encode()).hexdigest() for token in tokens}
    assert not any(token in path.read_text() for token in tokens)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_without_a_final_newline_gets_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# clients")
    assert main(["a", "--file", str(path)]) == 0
    first, second = path.read_text().splitlines()
    assert first == "# clients"
    assert second.startswith("a infer sha256:")


def test_bad_arguments_and_an_unwritable_file_are_errors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["a", "--file", str(tmp_path / "no" / "file")]) == 1
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    for arguments, said in (
        (["a b"], "a name starts with a letter or digit"),
        (["a", "--roles", "admin"], "the roles are control and infer"),
        (["a", "--roles", ""], "the roles are control and infer"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert said in capsys.readouterr().err
