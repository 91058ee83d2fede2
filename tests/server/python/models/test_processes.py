"""A function in processes as an instance of a model: its limits, its health, and what is left of a load that fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from polling import PATIENCE, until
from support.models.controlled import run_in_thread
from support.open_files import open_files
from support.processes.observed import own_children

from tensorferry.batcher import InstanceFailed, RunTimedOut
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import StartError
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.processes.functions import worker_process
from tensorferry.server.processes.functions.errors import ProcessDied
from tensorferry.server.processes.functions.worker_process import WorkerProcess
from tensorferry.server.python.functions.app_file import import_app
from tensorferry.server.python.models.instance import FunctionInstance
from tensorferry.server.runtime.recovery.instance_health import InstanceEvent, InstanceHealth
from tensorferry.server.runtime.recovery.watchdog import RunLimits

# A test writes the files: a start that finds `hold` waits until it is gone, one that finds `ill` fails.
_APP = """
import os, threading
from pathlib import Path
import numpy as np
from tensorferry.serving import FP32, model

HERE = Path(__file__).parent
(HERE / "starting").touch()
if (HERE / "ill").exists():
    raise OSError("no weights")
if (HERE / "hold").exists():
    # Opened when the test opens the other end.
    (HERE / "hold").read_bytes()

@model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, processes=1)
def act(x):
    if x[0] == 1:
        (HERE / "hangs").touch()
        threading.Event().wait()
    if x[0] == 2:
        os._exit(3)
    return x

@model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, streams=True, processes=1)
def count(x):
    yield x
    os._exit(3)


@model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, processes=2)
def wrong(x):
    return [1, 2, 3]


@model(inputs={"x": FP32[-1]}, outputs={"y": FP32[-1]}, processes=2)
def endless(x):
    while True:
        pass
"""


class Instance:
    """An instance, its process and health, with the time as the watchdog sees it."""

    def __init__(self, app: Path) -> None:
        self.process = WorkerProcess(app, "act", name="model act, process 0")
        self.health = InstanceHealth("act", "1")
        self._instance = FunctionInstance(
            "act", self.process.run, self.process, self.health, 0, RunLimits(None, 5.0, 1.0)
        )

    def run(self, *x: float, rows: Any = ()) -> Any:
        outputs: Any = self._instance.run({"x": np.array(x, "f4")}, rows)
        return outputs.tolist()

    def check_after(self, seconds: float) -> float | None:
        return self._instance.check(time.monotonic() + seconds)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before, children = open_files(), own_children()
    yield
    assert not open_files() - before
    assert not own_children() - children


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(_APP)
    return tmp_path / "app.py"


@pytest.fixture
def instance(app: Path, nothing_left: None) -> Iterator[Instance]:
    instance = Instance(app)
    yield instance
    instance.process.close()


def test_a_hanging_run_is_ended_and_the_next_start_may_take_longer_than_a_run(
    instance: Instance, app: Path
) -> None:
    instance.process.start()
    run = run_in_thread(lambda: instance.run(1))
    until((app.parent / "hangs").exists)
    assert instance.check_after(6.0) is not None
    assert isinstance(run.exception(PATIENCE), RunTimedOut)
    assert instance.health.statistics().events == {InstanceEvent.RUN_ENDED: 1}

    os.mkfifo(app.parent / "hold")
    (app.parent / "starting").unlink()
    run = run_in_thread(lambda: instance.run(3))
    until((app.parent / "starting").exists)
    assert instance.check_after(6.0) is not None
    (app.parent / "hold").write_bytes(b"")
    assert run.result(PATIENCE) == [3]
    assert instance.health.statistics().events == {InstanceEvent.RUN_ENDED: 1, InstanceEvent.REBUILT: 1}


def test_a_start_that_hangs_is_ended_too(instance: Instance, app: Path) -> None:
    os.mkfifo(app.parent / "hold")
    run = run_in_thread(lambda: instance.run(0))
    until((app.parent / "starting").exists)
    assert instance.check_after(61.0) is not None
    assert isinstance(run.exception(PATIENCE), InstanceFailed)
    assert instance.health.reason is not None
    (app.parent / "hold").unlink()
    assert instance.run(0) == [0]
    assert instance.health.reason is None


def test_a_process_that_cannot_start_again_puts_its_instance_out_of_service(
    instance: Instance, app: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(worker_process, "time", SimpleNamespace(monotonic=lambda: now))
    instance.process.start()
    with pytest.raises(ProcessDied):
        instance.run(2, rows=(1, 1))
    (app.parent / "ill").touch()
    with pytest.raises(InstanceFailed) as caught:
        instance.run(0)
    assert instance.health.reason == str(caught.value)
    assert "no weights" not in instance.health.reason
    assert caplog.text.count("OSError: no weights") == 1
    recover = caught.value.recover
    assert recover is not None
    with pytest.raises(InstanceFailed):
        recover()
    assert caplog.text.count("OSError: no weights") == 2
    with pytest.raises(InstanceFailed) as early:
        recover()
    assert 0.0 < early.value.retry_after <= 0.1
    (app.parent / "ill").unlink()
    now = 1.0
    until(lambda: _recovers(recover))
    assert instance.health.reason is None
    assert instance.run(0) == [0]
    events = instance.health.statistics().events
    assert events[InstanceEvent.PROCESS_DIED] == events[InstanceEvent.REBUILT] == 1
    assert events[InstanceEvent.REBUILD_FAILED] >= 3


def test_a_stream_does_not_run_again_if_its_process_cannot_start_again(app: Path) -> None:
    process, health = WorkerProcess(app, "count", name="count"), InstanceHealth("count", "1")
    instance = FunctionInstance(
        "count", lambda inputs, rows: process.answers(inputs), process, health, 0, RunLimits()
    )
    answers: Any = instance.answers({"x": np.array([2], "f4")}, lambda cancel: None)
    assert next(answers).tolist() == [2]
    (app.parent / "ill").touch()
    with pytest.raises(ProcessDied):
        next(answers)
    process.close()


def _recovers(recover: Callable[[], None]) -> bool:
    try:
        recover()
    except InstanceFailed:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", "3 rows"),
        ("endless", r"a trial run of function 'endless' on x \[1\] did not end within 0\.1"),
    ],
)
def test_a_load_that_fails_leaves_no_process(app: Path, name: str, message: str) -> None:
    source = ModelSource(name, app, declaration=import_app(app)[name])
    seconds = 0.1 if name == "endless" else PATIENCE
    with pytest.raises(StartError, match=message):
        load_model(source, LoadContext(ServerConfig((source,), run_timeout=seconds)))
