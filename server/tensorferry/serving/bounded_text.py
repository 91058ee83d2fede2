"""Tokenizing within a bound: of a long text only what can matter for the tokens that are kept is tokenized."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensorferry.serving.errors import InvalidInput

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

# The most characters of a text that are tokenized, for each token that is kept. A token of prose has about 5.
_CHARACTERS_PER_TOKEN = 32
# The bound is at least this, so that documents of a few pages need no cut. A batch of 256 such texts takes seconds.
_LEAST_BOUND = 32 * 1024
# A text is first cut to this many characters for each token, which is enough for prose. It is also the bound for pairs,
# because the package makes every pair of what it cuts off both texts.
_FIRST_CHARACTERS_PER_TOKEN = 8
# Rows tokenized at once, of one text and of two. A token takes about 400 bytes until it is a number of an array.
_ROWS_AT_ONCE = {1: 64, 2: 8}

# Normalizers by which a text without its last word becomes the same as within a longer text.
_LOCAL_NORMALIZERS = {
    "BertNormalizer",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",
    "Prepend",
    "Strip",
    "StripAccents",
}
# The only regular expression of `Replace` that is known to be local. sentencepiece's tokenizers have it.
_BLANKS = " {2,}"


class BoundedTokenizer:
    """A tokenizer that reads no more of a text than a bound. Thread-safe.

    A row gives the tokens that the tokenizer gives for the whole text, or is refused. `most_characters` is the bound.

    A text is cut before a blank if that is known to change nothing but tokens that are not kept. The tokens before the
    last word of the part are then those of the whole text. They are enough if they fill the row.
    """

    def __init__(self, tokenizer: Tokenizer, inputs: Sequence[str], *, lists: bool = False) -> None:
        """`inputs` has the names of one input, or of the two of a tokenizer of pairs.

        If it `lists` tokens, it is one without truncation, and encodings have the positions of the tokens in the text.
        """
        self._lists = lists
        self._tokenizer = tokenizer
        self._inputs = tuple(inputs)
        self._kept = tokenizer.truncation["max_length"] if tokenizer.truncation else 0
        first = _FIRST_CHARACTERS_PER_TOKEN * self._kept
        pairs = len(self._inputs) == 2
        bound = max(_LEAST_BOUND, _CHARACTERS_PER_TOKEN * self._kept)
        self.most_characters = first if pairs and self._kept else bound
        special = tokenizer.num_special_tokens_to_add(pairs)
        # "fast" leaves out the positions of the tokens in the text, and, of a pair without special tokens, which text they are
        # of.
        self._encode = tokenizer.encode_batch_fast
        if lists or (pairs and not special):
            self._encode = tokenizer.encode_batch
        # The part of a text that fills a row by itself must fill one of a pair.
        alone = tokenizer.num_special_tokens_to_add(False)
        cuts = self._kept > special >= alone and _cuts_at_blanks(tokenizer)
        # The characters to which a text is cut, ascending; none if it is not cut.
        self._sizes = sorted({first, self.most_characters}) if cuts else ()
        # If both texts of a pair are too long, the longer one keeps the odd token.
        self._compares = pairs and (self._kept - special) % 2 == 1

    def encode(self, columns: Sequence[list[str]]) -> Iterator[Encoding]:
        """Yield the encoding of each row, given the texts of each input. InvalidInput for a text above the bound."""
        at_once = _ROWS_AT_ONCE[len(columns)]
        for first in range(0, len(columns[0]), at_once):
            parts = [
                self._cut(name, texts[first : first + at_once])
                for name, texts in zip(self._inputs, columns, strict=True)
            ]
            if self._compares:
                self._check_the_longer_is_known([texts[first : first + at_once] for texts in columns], parts)
            yield from self._encode(parts[0] if len(parts) == 1 else list(zip(*parts, strict=True)))

    def _cut(self, name: str, texts: list[str]) -> list[str]:
        """Return the texts, or parts of them that give the same tokens; InvalidInput if neither is within the bound."""
        found = list(texts)
        for characters in self._sizes:
            long = [row for row, text in enumerate(found) if len(text) > characters and text is texts[row]]
            parts = [_before_blank(texts[row], characters) for row in long]
            for row, part, encoding in zip(long, parts, self._tokenizer.encode_batch(parts), strict=True):
                if _fills_row(encoding):
                    found[row] = part
        longest = max(map(len, found), default=0)
        if longest > self.most_characters:
            if self._lists:
                why = "tokens are listed of whole texts only: send shorter texts"
            elif self._sizes:
                why = (
                    f"those do not give the {self._kept} tokens that it keeps of a longer one: send shorter texts, or texts "
                    "with fewer blanks and shorter words"
                )
            else:
                why = "it cannot cut a longer one: send shorter texts, or declare tokenizer(..., max_length=N) with a larger N"
            raise InvalidInput(
                f"input {name!r} has a text of {longest} characters; this tokenizer reads at most {self.most_characters} of a "
                f"text, and {why}"
            )
        return found

    def _check_the_longer_is_known(self, whole: Sequence[list[str]], parts: Sequence[list[str]]) -> None:
        """Raise InvalidInput for a pair that is longer than a row if its parts do not show which text has more tokens."""
        for texts, cut in zip(zip(*whole, strict=True), zip(*parts, strict=True), strict=True):
            uncut = list(map(operator.is_, texts, cut))
            if all(uncut):
                continue
            if any(uncut):
                # A part of a text has at most the tokens of the text, so that more than those of the other text are enough.
                tokens = [_token_count(each) for each in self._tokenizer.encode_batch(list(cut))]
                if tokens[uncut.index(False)] > tokens[uncut.index(True)]:
                    continue
            raise InvalidInput(
                f"inputs {self._inputs[0]!r} and {self._inputs[1]!r} have texts of {len(texts[0])} and {len(texts[1])} "
                "characters in one row, and only their whole tokens show which of them is longer and keeps one token more: "
                f"send at most {self._kept} tokens in one of both"
            )


def _before_blank(text: str, characters: int) -> str:
    """Return the longest part of at most `characters` characters from the start that ends where a blank begins, or ""."""
    return text[: characters + 1].rpartition(" ")[0].rstrip()


def _fills_row(part: Encoding) -> bool:
    """Whether the tokens that are kept of a part of a text end before the part's last word."""
    if not part.overflowing:
        return False
    words = [_last_word(each) for each in (part, part.overflowing[-1])]
    return words[0] < words[1]


def _token_count(encoding: Encoding) -> int:
    """Return a number that grows with the tokens of a text, those that are not kept included."""
    return sum(map(len, (encoding, *encoding.overflowing)))


def _last_word(encoding: Encoding) -> int:
    """Return the number of the word that the last token is of; -1 if all are special tokens."""
    return max([word for word in encoding.word_ids if word is not None], default=-1)


def _cuts_at_blanks(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer is known to give the words before a blank the same tokens, whatever follows it."""
    file = json.loads(tokenizer.to_str())
    truncation = file["truncation"]
    if (truncation["direction"], truncation["strategy"]) != ("Right", "LongestFirst"):
        return False
    first = file["pre_tokenizer"]
    while first is not None and first["type"] == "Sequence":
        # The later ones get each word of the first by itself.
        first = next(iter(first["pretokenizers"]), None)
    match first:
        case {"type": "BertPreTokenizer" | "Whitespace" | "WhitespaceSplit"}:
            pass
        case {"type": "ByteLevel", "use_regex": True} | {"type": "Metaspace", "split": True}:
            pass
        case _:
            return False
    # Added tokens are found before words are. One with a blank could begin in a part of a text and end after it.
    added = [token["content"] for token in file["added_tokens"]]
    if tokenizer.normalizer is not None:
        added += map(tokenizer.normalizer.normalize_str, added.copy())
    return _is_local(file["normalizer"]) and not any(map(str.isspace, "".join(added)))


def _is_local(normalizer: Mapping[str, Any] | None) -> bool:
    match normalizer:
        case None:
            return True
        case {"type": "Sequence", "normalizers": parts}:
            return all(map(_is_local, parts))
        case {"type": "Replace", "pattern": {"Regex": pattern}}:
            return bool(pattern == _BLANKS)
        case {"type": "Replace", "pattern": {"String": pattern}}:
            return not any(character.isspace() for character in pattern)
        case {"type": kind}:
            return kind in _LOCAL_NORMALIZERS
    return False
