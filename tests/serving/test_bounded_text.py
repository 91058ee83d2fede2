"""Tokenizing within a bound: which texts are cut, that no cut changes a row, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tensorferry.serving import InvalidInput

pytest.importorskip("tokenizers", reason="needs the package tokenizers")
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from tensorferry.serving.bounded_text import BoundedTokenizer

SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PROSE = [
    "The quick brown fox doesn't jump over the lazy dog; it's asleep, in 1984.",
    "caf\u00e9 na\u00efve \u65e5\u672c\u8a9e x\u0301y \ufb01ne unbelievable unbelievably",
]
# Pieces of texts: words, blanks of several kinds and lengths, controls, special tokens, and characters that join others.
PIECES = [
    *PROSE[0].split(), *PROSE[1].split(), "[MASK]", "[MA", "SK]", "'s", "_" * 9, "word" * 40,
    *"\u0301\u0600\u200d\x01\u3000\u00a0\n\t.\u2581", "  \n  ",
]  # fmt: skip
MAX_LENGTH = 8


def trained(model: Any, trainer: Any, pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    """Return a tokenizer of one model, with special tokens, that keeps `MAX_LENGTH` tokens of a text."""
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    made.train_from_iterator(PROSE, trainer)
    # It takes the blanks on both of its sides.
    made.add_special_tokens([AddedToken("[MASK]", lstrip=True, rstrip=True)])
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    made.enable_truncation(MAX_LENGTH)
    return made


def wordpiece() -> Tokenizer:
    return trained(
        models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=20),
        trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False),
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
    )


def byte_level() -> Tokenizer:
    return trained(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=SPECIAL,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        normalizers.NFC(),
    )


def unigram() -> Tokenizer:
    return trained(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=120, special_tokens=SPECIAL, unk_token="[UNK]", show_progress=False
        ),
        pre_tokenizers.Metaspace(),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
    )


KINDS = {"WordPiece": wordpiece, "byte-level BPE": byte_level, "Unigram": unigram}


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch(self, texts: Sequence[str]) -> Any:
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch(texts)

    def encode_batch_fast(self, texts: Sequence[str]) -> Any:
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts)


def ids(bounded: BoundedTokenizer, *columns: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in bounded.encode(columns)]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_rows_are_those_of_the_whole_texts(make: Callable[[], Tokenizer]) -> None:
    tokenizer, draw = make(), random.Random(5)
    texts = [
        "".join(draw.choice(PIECES) + " " * draw.choice([0, 1, 1, 1, 2, 5]) for _ in range(60))
        for _ in range(300)
    ]
    expected = [tokenizer.encode(text).ids for text in texts]
    counting: Any = Counting(tokenizer)
    assert ids(BoundedTokenizer(counting, ["text"]), texts) == expected
    # Otherwise this test compares the tokenizer with itself.
    assert counting.characters < sum(map(len, texts))


def test_the_last_word_of_a_part_fills_no_row() -> None:
    """Metaspace splits at blanks only, so that a line break belongs to the word before it."""
    vocabulary = ["[UNK]", "\u2581a", "\u2581b", "##cd", "\u2581bcd\n"]
    tokenizer = Tokenizer(
        models.WordPiece({token: at for at, token in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.enable_truncation(4)
    text = "a a a bcd\n " + "a" * 100
    assert (
        ids(BoundedTokenizer(tokenizer, ["text"]), [text]) == [[1, 1, 1, 4]] == [tokenizer.encode(text).ids]
    )


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_a_long_text_is_cut_before_it_is_tokenized(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    counting: Any = Counting(tokenizer)
    texts = ["hi " * 1_000_000, "hi"]
    assert ids(BoundedTokenizer(counting, ["text"]), texts) == [
        tokenizer.encode(text[:3000]).ids for text in texts
    ]
    assert counting.characters < 200


@pytest.mark.parametrize("text", [" " * 3_000_000 + "hi", "x" * 3_000_000], ids=["blanks", "one word"])
def test_a_text_whose_beginning_does_not_fill_a_row_is_refused(text: str) -> None:
    counting: Any = Counting(wordpiece())
    bounded = BoundedTokenizer(counting, ["text"])
    with pytest.raises(
        InvalidInput,
        match=rf"input 'text' has a text of {len(text)} characters; this tokenizer reads at most 32768 .* the 8 tokens",
    ):
        ids(bounded, [text])
    assert counting.characters < 2 * bounded.most_characters


def uncuttable() -> dict[str, Tokenizer]:
    """Return tokenizers whose rows may depend on the whole text."""
    made = {name: wordpiece() for name in ("left", "untruncated", "joining", "token with a blank")}
    made |= {"one word": unigram(), "regular expression": byte_level()}
    made["left"].enable_truncation(MAX_LENGTH, direction="left")
    made["untruncated"].no_truncation()
    made["joining"].normalizer = normalizers.Replace("hi hi", "cat")
    made["token with a blank"].add_tokens(["hi there hi"])
    made["one word"].pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    made["regular expression"].pre_tokenizer = pre_tokenizers.Split(Regex(r"(?:.|\n)*end|."), "isolated")
    return made


def test_a_text_that_cannot_be_cut_is_whole_or_refused() -> None:
    message = r"input 'text' has a text of 60003 characters; this tokenizer reads at most 32768 of a text, .*max_length=N"
    text = "hi " * 10_000 + "end"
    for name, tokenizer in uncuttable().items():
        counting: Any = Counting(tokenizer)
        bounded = BoundedTokenizer(counting, ["text"])
        assert ids(bounded, [text]) == [tokenizer.encode(text).ids], name
        counting.characters = 0
        with pytest.raises(InvalidInput, match=message):
            ids(bounded, ["hi", "hi " * 20_000 + "end"])
        assert not counting.characters, name


@pytest.mark.parametrize("max_length", [9, 10])
def test_rows_are_those_of_whole_pairs(max_length: int) -> None:
    tokenizer, draw = wordpiece(), random.Random(7)
    tokenizer.enable_truncation(max_length)
    bounded = BoundedTokenizer(tokenizer, ["query", "passage"])
    for first, second in [(1, 200), (2, 40), (4, 100)]:
        columns = [
            [" ".join(draw.choices(PROSE[0].split(), k=n)) for _ in range(10)] for n in (first, second)
        ]
        expected = [tokenizer.encode(*pair).ids for pair in zip(*columns, strict=True)]
        assert ids(bounded, *columns) == expected


def test_a_pair_without_special_tokens_says_which_text_a_token_is_of() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "hi": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (encoding,) = BoundedTokenizer(tokenizer, ["query", "passage"]).encode([["hi"], ["a hi"]])
    assert (encoding.ids, encoding.type_ids) == ([1, 0, 1], [0, 1, 1])


def test_a_pair_of_texts_that_are_both_too_long_is_refused_only_if_the_longer_one_matters() -> None:
    tokenizer = wordpiece()
    texts = "lazy " * 500, "dog " * 501
    tokenizer.enable_truncation(9)
    expected = tokenizer.encode(texts[0][:60], texts[1][:60]).ids
    assert ids(BoundedTokenizer(tokenizer, ["query", "passage"]), [texts[0]], [texts[1]]) == [expected]
    tokenizer.enable_truncation(10)
    with pytest.raises(
        InvalidInput,
        match=r"inputs 'query' and 'passage' have texts of 2500 and 2004 characters in one row, .* at most 10 tokens",
    ):
        ids(BoundedTokenizer(tokenizer, ["query", "passage"]), [texts[0]], [texts[1]])


@pytest.mark.parametrize("order", [1, -1], ids=["whole, cut", "cut, whole"])
def test_a_whole_text_with_more_tokens_than_the_part_of_the_other_one_is_no_longer_text(order: int) -> None:
    tokenizer = wordpiece()
    tokenizer.enable_truncation(10)
    bounded = BoundedTokenizer(tokenizer, ["query", "passage"])
    # 70 characters of one token each, and so many tokens of several characters that they are more.
    dense, long = ", " * 35, "lazy " * 500
    with pytest.raises(InvalidInput, match="show which of them is longer"):
        ids(bounded, *([text] for text in [dense, long][::order]))
    short = [", " * 8, long][::order]
    assert ids(bounded, *([text] for text in short)) == [tokenizer.encode(short[0], short[1]).ids]
