"""Text to vectors with a sentence encoder: batches by length, and batches in the order of arrival."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from tokenizers import Tokenizer

from tensorferry.serving import FP32, STRING, model, onnx, pipeline, tokenizer

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
embed = pipeline("embed", tokenizer(_TOKENIZER), "encoder", task="embedding")

_padding = Tokenizer.from_file(str(_TOKENIZER))
_padding.enable_padding()


@model(inputs={"text": STRING[-1]}, outputs={"sentence_embedding": FP32[-1, 384]}, name="arrival")
class Arrival:
    """Tokenizer and encoder as one function: batches in the order of arrival, padded to their longest text."""

    def load(self) -> None:
        """Open the model."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            str(_ENCODER), options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, text: npt.NDArray[Any]) -> Any:
        """Return the vectors of a batch of texts of any lengths."""
        encodings = _padding.encode_batch_fast(text.tolist())
        fields = ("ids", "attention_mask", "type_ids")
        tokens = (np.array([getattr(each, field) for each in encodings]) for field in fields)
        return self.session.run(None, dict(zip(_TENSORS, tokens, strict=True)))[0]
