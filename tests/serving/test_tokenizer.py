"""The tokenizer as a model: what it declares, gives and refuses. The files are made by the package tokenizers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorferry.serving import STRING, DeclarationError, FunctionModel, InvalidInput, RowPadding, tokenizer

pytest.importorskip("tokenizers", reason="needs the package tokenizers")
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

VOCABULARY = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "a": 4, "cat": 5, "sat": 6, "here": 7}


def words(vocabulary: dict[str, int] = VOCABULARY) -> Tokenizer:
    """Return a tokenizer of whole words, with special tokens around each text."""
    made = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens([AddedToken(token) for token in vocabulary if token.startswith(("[", "<"))])
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return made


def saved(directory: Path, made: Tokenizer) -> Path:
    path = directory / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return saved(tmp_path, words())


def loaded(declared: FunctionModel) -> Any:
    made = declared()
    made.load()
    return made


def texts(*rows: str) -> Any:
    return np.array(rows, object)


def lists(outputs: dict[str, Any]) -> dict[str, list[list[int]]]:
    for rows in outputs.values():
        assert all(row.dtype == np.int64 for row in rows)
    return {name: [row.tolist() for row in rows] for name, rows in outputs.items()}


def test_each_row_has_the_length_of_its_tokens(file: Path) -> None:
    assert lists(loaded(tokenizer(file))(text=texts("a cat sat here", "a dog", ""))) == {
        "input_ids": [[2, 4, 5, 6, 7, 3], [2, 4, 1, 3], [2, 3]],
        "attention_mask": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1], [1, 1]],
        "token_type_ids": [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0], [0, 0]],
    }


def test_pairs_of_texts_have_types(file: Path) -> None:
    declared = tokenizer(file, input=("query", "passage"), name="pairs")
    assert declared.inputs == {"query": STRING[-1], "passage": STRING[-1]}
    outputs = lists(loaded(declared)(query=texts("a", "cat"), passage=texts("cat sat", "here")))
    assert outputs["input_ids"] == [[2, 4, 3, 5, 6, 3], [2, 5, 3, 7, 3]]
    assert outputs["token_type_ids"] == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]


def test_a_list_has_all_tokens_with_the_positions_of_their_bytes(tmp_path: Path) -> None:
    made = words()
    made.enable_padding(length=128)
    made.enable_truncation(4)
    declared = tokenizer(saved(tmp_path, made), outputs=["token_list"])
    assert (declared.outputs, declared.row_padding) == ({"token_list": STRING[-1]}, None)
    ascii, other = map(
        json.loads, loaded(declared)(text=texts("a cat  sat here", "é cat 猫 a"))["token_list"]
    )
    start = {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None}
    end = {"id": 3, "text": "[SEP]", "special": True, "start": None, "stop": None}
    assert (ascii[0], ascii[-1]) == (start, end)
    plain = [tuple(token[name] for name in ("id", "text", "start", "stop")) for token in ascii[1:-1]]
    assert plain == [(4, "a", 0, 1), (5, "cat", 2, 5), (6, "sat", 7, 10), (7, "here", 11, 15)]
    plain = [tuple(token[name] for name in ("id", "text", "start", "stop")) for token in other[1:-1]]
    assert plain == [(1, "é", 0, 2), (5, "cat", 3, 6), (1, "猫", 7, 10), (4, "a", 11, 12)]
    with pytest.raises(InvalidInput, match="tokens are listed of whole texts only: send shorter texts"):
        loaded(declared)(text=texts("a " * 20_000))


def test_padding_of_the_file_is_off_and_its_truncation_is_not(tmp_path: Path) -> None:
    made = words()
    made.enable_padding(length=128)
    made.enable_truncation(4)
    outputs = lists(loaded(tokenizer(saved(tmp_path, made)))(text=texts("a", "a cat sat here")))
    assert outputs["input_ids"] == [[2, 4, 3], [2, 4, 5, 3]]


def test_max_length_replaces_the_truncation_of_the_file_and_keeps_its_direction(tmp_path: Path) -> None:
    made = words()
    made.enable_truncation(5, stride=2, direction="left")
    path = saved(tmp_path, made)
    assert lists(loaded(tokenizer(path, max_length=3))(text=texts("a cat sat here")))["input_ids"] == [
        [2, 7, 3]
    ]
    long = lists(loaded(tokenizer(path, max_length=100))(text=texts("a cat sat here")))
    assert long["input_ids"] == [[2, 4, 5, 6, 7, 3]]


def test_max_length_must_hold_more_than_the_special_tokens(file: Path) -> None:
    with pytest.raises(
        DeclarationError, match=r"max_length is 2, but tokenizer.json adds 2 .*; it must be at least 3"
    ):
        loaded(tokenizer(file, max_length=2))
    with pytest.raises(DeclarationError, match="adds 3 special tokens"):
        loaded(tokenizer(file, max_length=3, input=("a", "b")))


def test_rows_are_padded_to_powers_of_two(file: Path) -> None:
    for max_length, lengths in (
        (None, (16, 32, 64, 128, 256, 512)),
        (128, (16, 32, 64, 128)),
        (100, (16, 32, 64, 100)),
        (10, (10,)),
        (8192, (16, 32, 64, 128, 256, 512)),
    ):
        declared = tokenizer(file, max_length=max_length)
        assert declared.row_padding is not None
        assert declared.row_padding().lengths == lengths


def test_the_pad_values_are_those_of_the_file(tmp_path: Path) -> None:
    made = words()
    made.enable_padding(pad_id=7, pad_type_id=1)
    declared = tokenizer(saved(tmp_path, made))
    assert declared.row_padding is not None
    assert declared.row_padding() == RowPadding(
        (16, 32, 64, 128, 256, 512), {"input_ids": 7, "attention_mask": 0, "token_type_ids": 1}
    )


@pytest.mark.parametrize(("token", "pad_id"), [("<pad>", 5), ("[PAD]", 5), ("<none>", 0)])
def test_the_pad_value_of_a_file_without_padding_is_the_pad_token(
    tmp_path: Path, token: str, pad_id: int
) -> None:
    made = words({"[UNK]": 1, "[CLS]": 2, "[SEP]": 3, token: 5})
    declared = tokenizer(saved(tmp_path, made))
    assert declared.row_padding is not None
    assert declared.row_padding().values["input_ids"] == pad_id


def test_a_relative_path_starts_at_the_directory_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = tmp_path / "app.py"
    app.write_text(
        "from tensorferry.serving import tokenizer\n"
        "declared = tokenizer('models/words.json')\n"
        "row = lambda text: (tok := declared(), tok.load(), tok(text=text))[2]\n"
    )
    (tmp_path / "models").mkdir()
    words().save(str(tmp_path / "models" / "words.json"))
    names: dict[str, Any] = {"__file__": str(app)}
    monkeypatch.chdir("/")
    exec(compile(app.read_text(), str(app), "exec"), names)
    assert names["declared"].name == "words"
    assert names["row"](texts("a"))["input_ids"][0].tolist() == [2, 4, 3]


def test_a_relative_path_without_a_file_of_the_caller_starts_at_the_current_directory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    names: dict[str, Any] = {}
    exec("from tensorferry.serving import tokenizer\ndeclared = tokenizer('tokenizer.json')", names)
    assert loaded(names["declared"])(text=texts("a"))["input_ids"][0].tolist() == [2, 4, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outputs": ("ids",)}, r"outputs are \('ids',\); they must be some of input_ids, .*step\("),
        ({"outputs": ()}, r"outputs are \(\)"),
        ({"outputs": "input_ids"}, r"outputs are 'input_ids'"),
        ({"input": ("a", "a")}, r"input is \('a', 'a'\); it must be a name, or two"),
        ({"input": ("a", "b", "c")}, "two different names"),
        ({"max_length": 0}, "max_length is 0; it must be an integer of at least 1"),
        ({"max_length": True}, "max_length is True"),
        ({"outputs": ["token_list", "input_ids"]}, "or token_list alone"),
        ({"outputs": ["token_list"], "max_length": 8}, "leave out max_length"),
        ({"outputs": ["token_list"], "input": ("a", "b")}, "give one input"),
    ],
)
def test_a_wrong_declaration_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        tokenizer("tokenizer.json", **arguments)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match=r"there is no file .*/absent.json; a relative path starts"):
        loaded(tokenizer(tmp_path / "absent.json"))


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"model": {"type": "Other"}}')
    with pytest.raises(
        DeclarationError, match=r"bad.json cannot be read as a tokenizer.json \(data did not match"
    ):
        loaded(tokenizer(path))


def test_a_file_elsewhere_is_read_from_its_copy(file: Path) -> None:
    address = "https://user:secret@host/dir/words.json?key=secret#sha256=" + 64 * "0"
    declared = tokenizer(address, input="words", max_length=3, max_batch_size=5)
    assert (declared.name, declared.inputs, declared.max_batch_size) == ("words", {"words": STRING[-1]}, 5)
    assert "secret" not in repr(declared)
    with pytest.raises(
        DeclarationError, match=r"'words' is elsewhere, and only a server fetches it: .* the path of a copy"
    ):
        loaded(declared)
    assert declared.elsewhere is not None
    assert declared.elsewhere.address == address
    local = declared.elsewhere.declare(file)
    assert (local.name, local.inputs, local.max_batch_size) == ("words", {"words": STRING[-1]}, 5)
    assert local.elsewhere is None
    assert lists(loaded(local)(words=texts("a cat")))["input_ids"] == [[2, 4, 3]]
    assert local.row_padding is not None
    assert local.row_padding().lengths == (3,)


def test_a_missing_package_is_named_with_the_extra(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    declared = tokenizer(file)
    with pytest.raises(DeclarationError, match="install it: pip install tokenizers"):
        loaded(declared)
