"""`tensorferry serve app.py`: functions, processes and pipelines, in a real server with real clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from e2e.fixtures import Serve
from polling import until
from support.models import small
from support.processes.server import ServerProcess, run_command

from tensorferry.client import InferenceClient, InferenceError

_APP = """
import os

import numpy as np

from tensorferry.serving import BYTES, FP32, INT64, STRING, InvalidInput, model, onnx, pipeline, step


@model(inputs={"text": STRING[-1]}, outputs={"length": INT64[-1]}, example={"text": ["abc"]})
def lengths(text):
    if "" in text:
        raise InvalidInput("text must not be empty")
    if "secret" in text:
        raise KeyError("/etc/secret/key")
    return np.array([len(one) for one in text])


@model(inputs={"blob": BYTES[()]}, outputs={"x": FP32[3]}, batched=False, processes=2, example={"blob": b"abc"})
def decode(blob):
    if blob == b"die":
        os._exit(7)
    return np.frombuffer(blob, np.uint8)[:3].astype(np.float32)


@model(inputs={"y": FP32[-1, 3]}, outputs={"label": STRING[-1], "process": INT64[-1]})
class Label:
    def load(self):
        self.names = ["red", "green", "blue"]

    def __call__(self, y):
        return [self.names[index] for index in y.argmax(axis=1)], [os.getpid()] * len(y)


colour = pipeline("colour", decode, step(onnx("twice.onnx")), Label, outputs=["label", "process", "x"])
"""


def written(folder: Path) -> Path:
    small.twice(folder / "twice.onnx")
    path = folder / "app.py"
    path.write_text(_APP)
    return path


@pytest.fixture(scope="module")
def server(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    app = written(tmp_path_factory.mktemp("app"))
    server = ServerProcess.start(app, "--metrics-port", "0", transport=transport)
    yield server
    assert server.stop() == 0, server.log


def test_functions_and_pipelines_are_served(server: ServerProcess) -> None:
    assert [model["name"] for model in server.ready["models"]] == ["colour", "lengths"]
    with InferenceClient(server.address) as client:
        assert client.infer("lengths", {"text": ["a", "äöü"]})["length"].tolist() == [1, 3]
        with pytest.raises(InferenceError, match="text must not be empty") as refused:
            client.infer("lengths", {"text": [""]})
        assert refused.value.code.name == "INVALID_ARGUMENT"
        with pytest.raises(InferenceError) as failed:
            client.infer("lengths", {"text": ["secret"]})
        assert failed.value.code.name == "INTERNAL"
        assert "/etc" not in str(failed.value)
        assert "model 'lengths' failed on this request" in str(failed.value)

        blobs = np.array([bytes([1, 2, 3]), bytes([9, 2, 255]), b"\xff\x00\x01"], object)
        answer = client.infer("colour", {"blob": blobs})
        assert answer["label"].tolist() == [b"blue", b"blue", b"red"]
        assert answer["x"].tolist() == [[1, 2, 3], [9, 2, 255], [255, 0, 1]]
    metrics = server.page()
    assert 'tensorferry_step_processes{model="colour",step="decode",version="1"} 2.0' in metrics
    for step in ("decode", "twice", "Label"):
        assert f'tensorferry_step_batches_total{{model="colour",step="{step}",version="1"}} ' in metrics
    # The traceback is in the log, once.
    until(lambda: sum("KeyError: '/etc/secret/key'" in line for line in server.log) == 1)


def test_one_of_many_requests_ends_its_process(server: ServerProcess) -> None:
    with InferenceClient(server.address) as client:
        good = np.array([bytes([1, 2, 3])], object)
        futures = [
            client.submit("colour", {"blob": np.array([b"die"], object) if n == 13 else good})
            for n in range(32)
        ]
        errors = [future.exception(60) for future in futures]
        assert [n for n, error in enumerate(errors) if error is not None] == [13]
        assert isinstance(errors[13], InferenceError)
        assert errors[13].code.name == "INTERNAL"
        # The same bytes end no other process.
        with pytest.raises(InferenceError) as again:
            client.infer("colour", {"blob": np.array([b"die"], object)})
        assert again.value.code.name == "INTERNAL"
    until(lambda: "exit status 7" in "\n".join(server.log))


@pytest.mark.parametrize("processes", [1, 2])
def test_an_import_error_is_shown_as_python_does(tmp_path: Path, transport: str, processes: int) -> None:
    app = tmp_path / "app.py"
    app.write_text("import numpy\n\nnumpy.no_such_name\n")
    arguments = ("serve", app, "--port", "0", "--transport", transport, "--processes", str(processes))
    done = run_command(*arguments)
    assert done.returncode == 1
    expected = (
        "Traceback (most recent call last):",
        f'  File "{app}", line 3, in <module>',
        "    numpy.no_such_name\n",
    )
    assert "\n    ".join(expected) in done.stderr
    assert "AttributeError: module 'numpy' has no attribute 'no_such_name'" in done.stderr


def test_a_changed_file_is_served_again(serve: Serve, tmp_path: Path) -> None:
    app = written(tmp_path)
    server = serve(app, "--reload")
    with InferenceClient(server.address) as client:
        assert client.infer("lengths", {"text": ["abc"]})["length"].tolist() == [3]
    # At once, because the server may look at the file at any moment.
    changed = tmp_path / "changed"
    changed.write_text(_APP.replace("len(one) for", "100 + len(one) for"))
    changed.rename(app)
    assert server.process.stdout is not None
    ready = json.loads(server.process.stdout.readline())
    with InferenceClient(ready["address"]) as client:
        assert client.infer("lengths", {"text": ["abc"]})["length"].tolist() == [103]
    assert server.stop() == 0
    assert f"{app} changed: the server is started again" in "".join(server.log)
