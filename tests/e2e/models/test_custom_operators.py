"""Models with custom operators on a real server: text in, tokens out; the file of an image in, pixels out."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from e2e.fixtures import Serve
from polling import PATIENCE, until
from support.models import custom_operator, extensions
from support.processes import observed
from support.processes.server import ServerProcess
from tritonclient.utils import InferenceServerException

from tensorferry.client import InferenceClient

PACKAGE = ("--custom-ops", "onnxruntime-extensions")
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_text_in_tokens_out_and_the_file_of_an_image_in_pixels_out(serve: Serve, tmp_path: Path) -> None:
    extensions.skip_without()
    lengths = {"fixed": 8, "longest": None}
    tokenizers = [extensions.tokenizer(tmp_path / f"{name}.onnx", length) for name, length in lengths.items()]
    server = serve(*tokenizers, extensions.image_decoder(tmp_path / "image.onnx"), *PACKAGE)
    batching = {model["name"]: model["batching"] for model in server.ready["models"]}
    assert "tested" in batching["fixed"]
    assert "unbatched" in batching["longest"]
    text = ["abc ab a", "", "a b c"]
    tokens = [["abc", "Ġ", "ab", "Ġ", "a"], [], ["a", "Ġ", "b", "Ġ", "c"]]
    with InferenceClient(server.address) as client:
        for name, length in lengths.items():
            answer = client.infer(name, {"text": np.array(text, object)}, timeout=PATIENCE)
            found = [
                [extensions.VOCABULARY[number] for number in ids[mask == 1]]
                for ids, mask in zip(answer["ids"], answer["mask"], strict=True)
            ]
            assert found == tokens
            assert answer["ids"].shape == (3, length or 5)
    with triton.InferenceServerClient(server.address) as client:
        assert np.array_equal(decoded(client, extensions.png(IMAGE)), IMAGE)
        with pytest.raises(InferenceServerException, match="Invalid image data"):
            decoded(client, b"no file")


IMAGE = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)


def decoded(client: triton.InferenceServerClient, data: bytes) -> Any:
    file = np.frombuffer(data, np.uint8)
    given = triton.InferInput("data", file.shape, "UINT8")
    given.set_data_from_numpy(file)
    return client.infer("image", [given], client_timeout=PATIENCE).as_numpy("image")


def test_an_operator_that_exits_ends_one_process_and_the_next_has_the_operators(
    transport: str, tmp_path: Path
) -> None:
    """For a file that is neither PNG nor JPEG, DecodeImage of onnxruntime-extensions 0.15 calls exit. (A later version
    may return an error.)
    """
    extensions.skip_without()
    path = extensions.image_decoder(tmp_path / "image.onnx")
    server = ServerProcess.start(path, *PACKAGE, "--processes", "2", transport=transport)
    with triton.InferenceServerClient(server.address) as client:
        with pytest.raises(InferenceServerException) as caught:
            decoded(client, b"text in place of an image")
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
    killed = observed.of_module(server.process.pid, "tensorferry.server.processes")
    for process in killed:
        # The one that exits may have ended.
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    with triton.InferenceServerClient(server.address) as client:
        assert np.array_equal(until(lambda: _decoded_or_none(client), lambda found: found is not None), IMAGE)
    until(lambda: not {*observed.of_module(server.process.pid, "tensorferry.server.processes")} & {*killed})
    assert server.stop() == 0, server.log


def _decoded_or_none(client: triton.InferenceServerClient) -> Any:
    try:
        return decoded(client, extensions.png(IMAGE))
    except InferenceServerException:
        return None


def answers(client: InferenceClient) -> bool:
    return np.array_equal(client.infer("m", {"x": X}, timeout=PATIENCE)["y"], 2 * (X + 1) + 1)


def test_a_library_of_one_model_leaves_the_others_proved(serve: Serve, tmp_path: Path) -> None:
    library = custom_operator.library(tmp_path / "twice.so")
    paths = {
        "m": custom_operator.model(tmp_path / "m.onnx"),
        "plain": custom_operator.model(tmp_path / "plain.onnx", "Relu", ""),
    }
    file = tmp_path / "c.toml"
    tables = [f"[models.{name}]\npath = '{path}'\n" for name, path in paths.items()]
    file.write_text(f"{tables[0]}custom-ops = ['{library}']\n{tables[1]}")
    server = serve("--config", file)
    batching = {model["name"]: model["batching"] for model in server.ready["models"]}
    assert {name: text.rpartition("(")[2] for name, text in batching.items()} == {
        "m": "tested)",
        "plain": "proved)",
    }
    with InferenceClient(server.address) as client:
        assert answers(client)


def test_a_repository_has_libraries_and_a_client_cannot_send_one(serve: Serve, tmp_path: Path) -> None:
    path = custom_operator.model(tmp_path / "models" / "m" / "1" / "model.onnx")
    library = custom_operator.library(path.with_name("libtwice.so"))
    named = 'model_operations { op_library_filename: "libtwice.so" }'
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(named)
    server = serve("--model-repository", tmp_path / "models", "--model-control", "explicit")
    config = {"model_operations": {"op_library_filename": ["libtwice.so"]}}
    files = {"file:1/model.onnx": path.read_bytes(), "file:1/libtwice.so": library.read_bytes()}
    with triton.InferenceServerClient(server.address) as control, InferenceClient(server.address) as client:
        control.load_model("m")
        assert answers(client)
        control.load_model("m", config=json.dumps({**config, "max_batch_size": 4}))
        assert answers(client)
        for name in ("m", "sent"):
            with pytest.raises(InferenceServerException, match="a client cannot choose libraries"):
                control.load_model(name, config=json.dumps(config), files=files)
        config["model_operations"]["op_library_filename"] = [str(library)]
        with pytest.raises(InferenceServerException, match="a client cannot choose libraries"):
            control.load_model("m", config=json.dumps(config))
        assert answers(client)
    assert server.stop() == 0
    server.log[:] = [line for line in server.log if "a client cannot choose libraries" not in line]
