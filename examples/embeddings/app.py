"""Sentences to vectors, and the similarity of two sentences.

python build.py && tensorferry serve app.py
"""

from typing import Any

import numpy as np

from tensorferry.serving import FP32, STRING, embeddings, infer, model, onnx, tokenizer

# The file pools the vectors of tokens itself, and scales them to length 1.
embed = embeddings(
    "embed", tokenizer("model/tokenizer.json"), onnx("model/minilm.onnx"), pooling=None, normalize=False
)


@model(inputs={"first": STRING[-1], "second": STRING[-1]}, outputs={"score": FP32[-1]})
def similarity(first: Any, second: Any) -> Any:
    """Return the cosine of the angle between the vectors of each pair of sentences."""
    vectors = infer("embed", text=np.concatenate([first, second]))["embedding"]
    return (vectors[: len(first)] * vectors[len(first) :]).sum(axis=1)
