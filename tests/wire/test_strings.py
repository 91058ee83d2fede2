"""Models that drop elements of their input, so that rows do not correspond, with tritonclient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from e2e.fixtures import Serve
from support.models import small
from support.wire.inputs import tensor
from support.wire.rig import PATIENCE, Answers
from tritonclient.utils import InferenceServerException


def texts(*words: str) -> list[Any]:
    return [tensor("x", np.array(words, dtype=object), "BYTES")]


def test_a_model_that_drops_words_is_served_unbatched(serve: Serve, tmp_path: Path) -> None:
    path = small.without_stop_words(tmp_path / "words.onnx")
    server = serve(path)
    assert server.ready["models"][0]["batching"].startswith("unbatched (StringNormalizer y removes strings")
    with triton.InferenceServerClient(server.address) as client:
        answers = Answers()
        for _ in range(8):
            client.async_infer("words", texts("The", "QUICK", "a", "fox"), answers.put)
        for _ in range(8):
            assert answers.result().as_numpy("y").tolist() == [b"quick", b"fox"]


def test_a_forced_batch_reports_the_mismatch_and_the_recommended_configuration_works(
    serve: Serve, tmp_path: Path
) -> None:
    path = small.without_stop_words(tmp_path / "words.onnx")
    # The configuration that the error message recommends for a model that must be batched.
    directory = tmp_path / "models" / "alone"
    (directory / "1").mkdir(parents=True)
    small.without_stop_words(directory / "1" / "model.onnx")
    (directory / "config.pbtxt").write_text(
        'max_batch_size: 0 input { name: "x" data_type: TYPE_STRING dims: [-1] } '
        'output { name: "y" data_type: TYPE_STRING dims: [-1] }'
    )
    repository = ("--model-repository", directory.parent)
    server = serve("--batching", "trust", "--max-queue-delay-ms", "50", path, *repository)
    with triton.InferenceServerClient(server.address) as client:
        good, bad = Answers(), Answers()
        for _ in range(3):
            client.async_infer("words", texts("quick", "fox"), good.put, client_timeout=PATIENCE)
            client.async_infer("words", texts("the", "fox"), bad.put, client_timeout=PATIENCE)
        for _ in range(3):
            # Neighbours get their own answers.
            assert good.result().as_numpy("y").tolist() == [b"quick", b"fox"]
            error = bad.error()
            assert error.status() == "StatusCode.INTERNAL"
            assert "output 'y' has shape [1], expected 2 rows" in error.message()
            assert "--max-batch-size 0" in error.message()
        assert client.infer("alone", texts("the", "fox")).as_numpy("y").tolist() == [b"fox"]
        with pytest.raises(InferenceServerException, match="unexpected shape"):
            client.infer("alone", [tensor("x", np.array([["fox"]], dtype=object), "BYTES")])
    assert server.stop() == 0
    warned = [line for line in server.log if "model words failed on " in line]
    assert len(warned) == 3
    assert all("output 'y' has shape [1], expected 2 rows" in line for line in warned)
