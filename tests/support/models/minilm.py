"""Reference of the sentence encoder all-MiniLM-L6-v2: numpy in double precision, one text at a time, without padding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

HEADS, LAYERS = 12, 6
_erf = np.vectorize(math.erf)

Array = npt.NDArray[np.float64]


class Reference:
    """The encoder as its paper has it; `weights` are those of model.safetensors."""

    def __init__(self, weights: Mapping[str, npt.NDArray[Any]]) -> None:
        self._weights = {name: np.asarray(weight, np.float64) for name, weight in weights.items()}

    def embed(self, ids: Sequence[int]) -> Array:
        """Return the vector of a text, of length 1, from the ids of its tokens."""
        weights = self._weights
        x = (
            weights["embeddings.word_embeddings.weight"][list(ids)]
            + weights["embeddings.position_embeddings.weight"][: len(ids)]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        x = self._normalized(x, "embeddings.LayerNorm")
        for number in range(LAYERS):
            x = self._layer(x, f"encoder.layer.{number}")
        mean = x.mean(axis=0)
        return np.asarray(mean / np.linalg.norm(mean))

    def _layer(self, x: Array, name: str) -> Array:
        query, key, value = (
            np.split(self._linear(x, f"{name}.attention.self.{part}"), HEADS, axis=1)
            for part in ("query", "key", "value")
        )
        contexts = []
        for q, k, v in zip(query, key, value, strict=True):
            scores = np.exp(q @ k.T / math.sqrt(q.shape[1]))
            contexts.append(scores / scores.sum(axis=1, keepdims=True) @ v)
        attended = self._linear(np.concatenate(contexts, axis=1), f"{name}.attention.output.dense")
        x = self._normalized(x + attended, f"{name}.attention.output.LayerNorm")
        inner = self._linear(x, f"{name}.intermediate.dense")
        gelu = inner * (1 + _erf(inner / math.sqrt(2))) / 2
        return self._normalized(x + self._linear(gelu, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def _linear(self, x: Array, name: str) -> Array:
        return np.asarray(x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"])

    def _normalized(self, x: Array, name: str) -> Array:
        centred = x - x.mean(axis=1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-12)
        scaled = centred / deviation * self._weights[f"{name}.weight"]
        return np.asarray(scaled + self._weights[f"{name}.bias"])
