"""Tokenizers: models that turn text into token ids, made from a `tokenizer.json` by the package `tokenizers`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tensorferry.serving.bounded_text import BoundedTokenizer
from tensorferry.serving.declarations import FileElsewhere, FunctionModel, RowPadding, address_of, name_at
from tensorferry.serving.errors import DeclarationError
from tensorferry.serving.tensor_types import INT64, STRING
from tensorferry.serving.text_tasks import TOKEN_LIST

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_Rows = list[npt.NDArray[np.int64]]

# Largest request of a client. The time of a batch of texts that cannot be cut grows with their bytes: 8 MiB take about ten
# seconds. The server's metadata has the bound, so that the bundled client splits larger requests.
_MOST_REQUEST_BYTES = 8 << 20

# The values of each output for one text. Without padding, every position has a token, so the mask has ones only.
_OUTPUTS: Mapping[str, Callable[[Encoding], npt.NDArray[np.int64]]] = {
    "input_ids": lambda encoding: np.array(encoding.ids, np.int64),
    "attention_mask": lambda encoding: np.ones(len(encoding), np.int64),
    "token_type_ids": lambda encoding: np.array(encoding.type_ids, np.int64),
}
# Tokens that mark padding, if the file does not say which token does.
_PAD_TOKENS = ("[PAD]", "<pad>")
# Rows are padded to these lengths, up to the most tokens of a row. There are no longer ones, because warm-up runs batches of
# each, which takes minutes for thousands of tokens.
_LENGTHS = (16, 32, 64, 128, 256, 512)
_EXAMPLES = (
    "The cat sits on the mat.",
    "A text of another length, so that the rows of the example differ.",
)


def tokenizer(
    path: str | Path,
    *,
    name: str | None = None,
    input: str | tuple[str, str] = "text",
    outputs: Sequence[str] = tuple(_OUTPUTS),
    max_length: int | None = None,
    max_batch_size: int = 256,
) -> FunctionModel:
    """Declare a `tokenizer.json` as a model: text in, token ids out. It needs the extra `text` of tensorferry.

        embed = pipeline("embed", tokenizer("tokenizer.json"), onnx("encoder.onnx"))

    A relative path starts at the directory of the file that calls this function. In place of a path there can be an
    address, such as "hf://ORG/REPO/tokenizer.json"; the server fetches it. `name` is that of the file by default. `input` is the name of the input, or two names for models that read pairs of texts. `outputs` are some of `input_ids`,
    `attention_mask` and `token_type_ids`, each with one int64 array a row, of the length of its tokens; or `token_list` alone,
    with a text a row: the JSON list of all its tokens, as /tokenize of HTTP gives it. That reads single texts, and cuts none.

    Special tokens, normalization and truncation are those of the file. `max_length`, the most tokens in a row with special
    tokens, replaces its truncation; a file without one leaves texts whole. Of a long text, only the first characters are
    tokenized, if they are known to give the same row; a text that has no such part is refused with InvalidInput. The
    padding of the file is not used: an ONNX step that reads the outputs pads them, by default to powers of two from 16 to
    `max_length`, at most 512, with the pad token of the file.

    A batch uses all cores, and leaves the GIL to other threads. The environment variables TOKENIZERS_PARALLELISM=false and
    RAYON_NUM_THREADS limit that. Raises DeclarationError; the server reads the file when it loads the model.
    """
    caller = sys._getframe(1).f_globals.get("__file__", "")
    address = address_of(path)
    if address:
        file = Path(name_at(address))
    else:
        file = Path(caller).absolute().parent / path if caller else Path(path).absolute()
    named = file.name.removesuffix(".json") if name is None else name
    inputs = (input,) if isinstance(input, str) else tuple(input)
    if len(inputs) not in (1, 2) or len(set(inputs)) != len(inputs):
        raise DeclarationError(
            f"tokenizer {named!r}: input is {input!r}; it must be a name, or two different names for pairs of texts"
        )
    lists = not isinstance(outputs, str) and tuple(outputs) == (TOKEN_LIST,)
    if isinstance(outputs, str) or not outputs or not (lists or set(outputs) <= set(_OUTPUTS)):
        raise DeclarationError(
            f"tokenizer {named!r}: outputs are {outputs!r}; they must be some of {', '.join(_OUTPUTS)}, or {TOKEN_LIST} alone. "
            "A step can rename them: step(tokenizer(...), outputs={'input_ids': 'tokens'})"
        )
    if lists and (len(inputs) > 1 or max_length is not None):
        raise DeclarationError(
            f"tokenizer {named!r}: {TOKEN_LIST} has all tokens of single texts; leave out max_length, and give one input"
        )
    if max_length is not None and (
        isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1
    ):
        raise DeclarationError(
            f"tokenizer {named!r}: max_length is {max_length!r}; it must be an integer of at least 1, or None for the "
            "truncation of the file"
        )
    settings = _Settings(named, file, inputs, tuple(outputs), max_length, address)
    declared = _declared(settings, max_batch_size)
    if not address:
        return declared
    return replace(
        declared,
        elsewhere=FileElsewhere(
            address, lambda copy: _declared(replace(settings, file=copy, address=""), max_batch_size)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Settings:
    name: str
    file: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_length: int | None
    # Where the file is fetched from, if it has not been.
    address: str = field(repr=False)

    @property
    def lists(self) -> bool:
        """Whether the output is the list of the tokens."""
        return self.outputs == (TOKEN_LIST,)


def _declared(settings: _Settings, max_batch_size: int) -> FunctionModel:
    class FileTokenizer(_FileTokenizer):
        """The tokenizer of one file; a worker makes its own object."""

        def __init__(self) -> None:
            super().__init__(settings)

    return FunctionModel(
        settings.name,
        FileTokenizer,
        dict.fromkeys(settings.inputs, STRING[-1]),
        dict.fromkeys(settings.outputs, STRING[-1] if settings.lists else INT64[-1, "tokens"]),
        max_batch_size,
        example={each: np.array(_EXAMPLES, object) for each in settings.inputs},
        row_padding=None if settings.lists else lambda: _row_padding(settings),
        most_request_bytes=_MOST_REQUEST_BYTES,
        pure=True,
    )


class _FileTokenizer:
    """A tokenizer that is read by `load`."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._tokenizer: BoundedTokenizer | None = None

    def load(self) -> None:
        read = _read(self._settings)
        read.no_padding()
        if self._settings.lists:
            read.no_truncation()
        self._tokenizer = BoundedTokenizer(read, self._settings.inputs, lists=self._settings.lists)

    def __call__(self, /, **texts: npt.NDArray[np.object_]) -> dict[str, Any]:
        """Return one array a row for each output, or an array of texts for lists. Call `load` once before."""
        if self._tokenizer is None:
            raise RuntimeError(f"tokenizer {self._settings.name!r} is not loaded; call load() before")
        columns = [texts[name].tolist() for name in self._settings.inputs]
        if self._settings.lists:
            encodings = self._tokenizer.encode(columns)
            return {TOKEN_LIST: np.array(list(map(_token_list, columns[0], encodings)), object)}
        rows: dict[str, _Rows] = {output: [] for output in self._settings.outputs}
        for encoding in self._tokenizer.encode(columns):
            for output, made in rows.items():
                made.append(_OUTPUTS[output](encoding))
        return rows


def _token_list(text: str, encoding: Encoding) -> str:
    """Return the tokens of a text as /tokenize of Text Embeddings Inference has them, whose positions are those of bytes."""
    at = range(len(text) + 1) if text.isascii() else [0, *accumulate(len(each.encode()) for each in text)]
    tokens = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
    found = []
    for number, token, special, (start, stop) in tokens:
        where = (token, True, None, None) if special else (text[start:stop], False, at[start], at[stop])
        found.append(dict(zip(("id", "text", "special", "start", "stop"), (number, *where), strict=True)))
    return json.dumps(found, separators=(",", ":"), ensure_ascii=False)


def _read(settings: _Settings) -> Tokenizer:
    """Return the tokenizer of the file, with the truncation of the settings; DeclarationError if that is impossible."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DeclarationError(
            f"tokenizer {settings.name!r} needs the package tokenizers; install it: pip install tokenizers"
        ) from None
    if settings.address:
        raise DeclarationError(
            f"tokenizer {settings.name!r} is elsewhere, and only a server fetches it: tensorferry serve FILE.py; to use it "
            "without one, give the path of a copy"
        )
    if not settings.file.is_file():
        raise DeclarationError(
            f"tokenizer {settings.name!r}: there is no file {settings.file}; a relative path starts at the directory of the "
            "file that declares the tokenizer"
        )
    try:
        read = Tokenizer.from_file(str(settings.file))
    except Exception as error:
        # The package raises nothing more specific.
        raise DeclarationError(
            f"tokenizer {settings.name!r}: {settings.file} cannot be read as a tokenizer.json ({error})"
        ) from None
    if settings.max_length is not None:
        special = read.num_special_tokens_to_add(len(settings.inputs) == 2)
        if settings.max_length <= special:
            # The package would not truncate at all.
            raise DeclarationError(
                f"tokenizer {settings.name!r}: max_length is {settings.max_length}, but {settings.file.name} adds {special} "
                f"special tokens to each row; it must be at least {special + 1}"
            )
        own = read.truncation or {}
        read.enable_truncation(**{**own, "stride": 0, "max_length": settings.max_length})
    return read


def _row_padding(settings: _Settings) -> RowPadding:
    """Return the lengths and values to which a step pads the outputs by default; reads the file."""
    read = _read(settings)
    longest = min(read.truncation["max_length"] if read.truncation else _LENGTHS[-1], _LENGTHS[-1])
    lengths = [length for length in _LENGTHS if length < longest]
    own = read.padding or {}
    known = (read.token_to_id(token) for token in _PAD_TOKENS)
    pad_id = own.get("pad_id", next((each for each in known if each is not None), 0))
    values = {"input_ids": pad_id, "attention_mask": 0, "token_type_ids": own.get("pad_type_id", 0)}
    return RowPadding((*lengths, longest), {output: values[output] for output in settings.outputs})
