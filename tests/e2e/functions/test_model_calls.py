"""Functions of an app file that call other models, in a real server: answers, errors, deadlines, and the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from polling import until
from support.models import small
from support.processes.server import ServerProcess, running

from tensorferry.client import InferenceClient, InferenceError

_APP = """
import os
import time
from pathlib import Path

import numpy as np

from tensorferry.serving import FP32, INT64, STRING, InvalidInput, infer, model, onnx, pipeline, submit

HERE = Path(__file__).parent

twice = onnx("twice.onnx")


@model(inputs={"x": FP32[-1, 3]}, outputs={"y": FP32[-1, 3], "process": INT64[-1]}, max_batch_size=64)
def a_chooser(x):
    y = np.where(x > 0, infer("twice", x=x)["y"], 0)
    if (x > 100).any():
        y = infer("a_chooser", x=x)["y"]
    return y.astype(np.float32), [os.getpid()] * len(x)


@model(inputs={"x": FP32[-1, 3]}, outputs={"y": FP32[-1, 3], "process": INT64[-1]}, processes=2, max_batch_size=64)
def in_processes(x):
    return infer("a_chooser", {"x": x})["y"], [os.getpid()] * len(x)


@model(inputs={"x": FP32[-1, 3]}, outputs={"sum": FP32[-1, 3]})
def several(x):
    futures = [submit("twice", x=x * factor) for factor in (1, 10, 100)]
    return sum(future.result()["y"] for future in futures)


TABLE = np.zeros((64, 3), np.float32)


@model(inputs={"x": FP32[-1, 3]}, outputs={"y": FP32[-1, 3]})
def constant(x):
    return TABLE[: len(x)]


def _changes(x):
    y = infer("constant", x=x)["y"]
    y += 1
    return y


_ROWS = {"inputs": {"x": FP32[-1, 3]}, "outputs": {"y": FP32[-1, 3]}}
zz_changes = model(**_ROWS, name="zz_changes")(_changes)
zz_changes_in_process = model(**_ROWS, name="zz_changes_in_process", processes=1)(_changes)


@model(inputs={"how": STRING[-1]}, outputs={"y": FP32[-1]})
def picky(how):
    if "refuse" in how:
        raise InvalidInput("it is refused")
    if "fail" in how:
        raise KeyError("/etc/secret")
    if "wait" in how:
        (HERE / "waits").touch()
        while not (HERE / "go").exists():
            time.sleep(0.01)
    return np.ones(len(how), np.float32)


def _asks(how):
    if how[0] == "unknown":
        return infer("nothing", how=how)["y"]
    if how[0] == "wrong":
        return infer("picky", how=np.zeros(1))["y"]
    if "wait" in how:
        (HERE / f"asked-{os.getpid()}").touch()
    return infer("picky", how=how)["y"]


_TYPES = {"inputs": {"how": STRING[-1]}, "outputs": {"y": FP32[-1]}}
zz_asks = model(**_TYPES, name="zz_asks")(_asks)
zz_asks_in_process = model(**_TYPES, name="zz_asks_in_process", processes=1)(_asks)
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calls")
    small.twice(folder / "twice.onnx")
    path = folder / "app.py"
    path.write_text(_APP)
    return path


@pytest.fixture(scope="module")
def server(transport: str, app: Path) -> Iterator[ServerProcess]:
    """The last test of the module stops it."""
    server = ServerProcess.start(app, transport=transport)
    yield server
    assert server.stop() == 0, server.log


@pytest.fixture
def files(app: Path) -> Iterator[Path]:
    """The folder of the app, with whose files tests hold `picky`."""
    yield app.parent
    for path in (*app.parent.glob("asked-*"), app.parent / "waits", app.parent / "go"):
        path.unlink(missing_ok=True)


def error(client: InferenceClient, model: str, **inputs: object) -> tuple[str, str]:
    with pytest.raises(InferenceError) as failed:
        client.infer(model, inputs)
    return failed.value.code.name, str(failed.value)


def asked(files: Path) -> int:
    """How many processes have called `picky`."""
    return len(list(files.glob("asked-*")))


def test_functions_call_other_models(server: ServerProcess) -> None:
    x = np.array([[1, -1, 2], [3, 4, -5]], np.float32)
    chosen = np.where(x > 0, 2 * x, 0)
    with InferenceClient(server.address) as client:
        np.testing.assert_array_equal(client.infer("a_chooser", {"x": x})["y"], chosen)
        np.testing.assert_array_equal(client.infer("several", {"x": x})["sum"], 222 * x)
        futures = [client.submit("in_processes", {"x": x + n}) for n in range(32)]
        for n, future in enumerate(futures):
            np.testing.assert_array_equal(future.result(60)["y"], np.where(x + n > 0, 2 * (x + n), 0))
        # More rows than a batch of the called model.
        many = np.tile(x, (60, 1))
        np.testing.assert_array_equal(client.infer("several", {"x": many})["sum"], 222 * many)


def test_an_answer_is_the_calling_functions_own(server: ServerProcess) -> None:
    with InferenceClient(server.address) as client:
        for name in ("zz_changes", "zz_changes_in_process"):
            for _ in range(3):
                assert client.infer(name, {"x": np.zeros((2, 3), np.float32)})["y"].tolist() == [[1] * 3] * 2


def test_errors_of_calls_reach_the_client(server: ServerProcess) -> None:
    with InferenceClient(server.address) as client:
        for model in ("zz_asks", "zz_asks_in_process"):
            assert client.infer(model, {"how": ["well"]})["y"].tolist() == [1]
            code, text = error(client, model, how=["refuse"])
            assert (code, "it is refused" in text) == ("INVALID_ARGUMENT", True)
            code, text = error(client, model, how=["wrong"])
            assert (code, "dtype float64" in text) == ("INVALID_ARGUMENT", True)
            code, text = error(client, model, how=["unknown"])
            assert (code, "'nothing'" in text) == ("NOT_FOUND", True)
            code, text = error(client, model, how=["fail"])
            assert (code, f"model {model!r} called model 'picky', which failed" in text) == ("INTERNAL", True)
            assert "/etc" not in text
        # A circle.
        code, text = error(client, "a_chooser", x=np.full((1, 3), 200, np.float32))
        assert code == "INTERNAL"
        assert client.infer("zz_asks", {"how": ["well"]})["y"].tolist() == [1]
    until(lambda: sum("KeyError: '/etc/secret'" in line for line in server.log) == 2)
    until(
        lambda: any("RecursionError" in line and "'a_chooser' -> 'a_chooser'" in line for line in server.log)
    )


def test_a_call_has_the_deadline_of_its_client(server: ServerProcess, files: Path) -> None:
    with InferenceClient(server.address) as client:
        # It occupies the only worker of `picky`.
        first = client.submit("picky", {"how": ["wait"]})
        assert until((files / "waits").exists)
        # The functions wait for their calls no longer than their clients do, so they are free again.
        for model in ("zz_asks", "zz_asks_in_process"):
            with pytest.raises(InferenceError) as failed:
                client.infer(model, {"how": ["well"]}, timeout=0.2)
            assert failed.value.code.name == "DEADLINE_EXCEEDED"
            code, _ = error(client, model, how=["unknown"])
            assert code == "NOT_FOUND"
        (files / "go").touch()
        assert first.result(60)["y"].tolist() == [1]


def test_a_call_is_answered_while_the_server_drains(server: ServerProcess, files: Path) -> None:
    with InferenceClient(server.address) as client:
        running = [client.submit(name, {"how": ["wait"]}) for name in ("zz_asks", "zz_asks_in_process")]
        assert until(lambda: asked(files) == 2)
        stopper = threading.Thread(target=server.stop)
        stopper.start()
        # The server refuses clients, but not the calls of functions.
        with InferenceClient(server.address) as other:
            assert until(lambda: not _answers(other))
        (files / "go").touch()
        assert [future.result(60)["y"].tolist() for future in running] == [[1], [1]]
        stopper.join()


def _answers(client: InferenceClient) -> bool:
    try:
        client.infer("several", {"x": np.zeros((1, 3), np.float32)}, timeout=10)
    except InferenceError:
        return False
    return True


def test_calls_of_models_that_do_not_exist_are_warned_of_at_start(transport: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from tensorferry.serving import FP32, infer, model, submit\n"
        "@model(inputs={'x': FP32[-1]}, outputs={'y': FP32[-1]})\n"
        "def one(x):\n"
        "    return x if x[0] else infer('none', x=x)['y'] + submit('one', x=x).result()['y']\n"
    )
    with running(tmp_path / "app.py", transport=transport, logs_errors=True) as server:
        pass
    (warning,) = [line for line in server.log if "calls the model" in line]
    assert "app.py:4 calls the model 'none', which this server does not have; it has one" in warning
