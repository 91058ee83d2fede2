"""Text to vectors with a sentence encoder: batches by length, and batches in the order of arrival."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tensorferry.serving import INT64, STRING, model, onnx, pipeline, tokenizer

_FOLDER = Path(os.environ["SERVING_BENCH_MODEL"])
_ENCODER, _TOKENIZER = _FOLDER / "minilm.onnx", _FOLDER / "tokenizer.json"
_TENSORS = ("input_ids", "attention_mask", "token_type_ids")
# Those to which an encoder that declares none pads the rows of this tokenizer.
_LENGTHS = (16, 32, 64, 128)

encoder = onnx(
    _ENCODER,
    name="encoder",
    pad_lengths=("tokens", _LENGTHS),
    pad_values=dict.fromkeys(_TENSORS, 0),
)
# By its name, so that the encoder alone and the one behind the tokenizer are the same.
embed = pipeline("embed", tokenizer(_TOKENIZER), "encoder")

_padding = Tokenizer.from_file(str(_TOKENIZER))
_padding.enable_padding()


@model(inputs={"text": STRING[-1]}, outputs=dict.fromkeys(_TENSORS, INT64[-1, -1]))
def tokenize_and_pad(text: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], ...]:
    """Return the tokens of texts of any lengths, padded to the longest text of the batch."""
    encodings = _padding.encode_batch_fast(text.tolist())
    fields = ("ids", "attention_mask", "type_ids")
    return tuple(np.array([getattr(each, field) for each in encodings]) for field in fields)


arrival = pipeline("arrival", tokenize_and_pad, onnx(_ENCODER))
