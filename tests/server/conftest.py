from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.models import small
from support.models.controlled import ScriptedRepository
from support.server.cpu_as_device import CountingDeviceMemory
from support.server.rig import PATIENCE, Load, Make, made_apps
from support.server.scripted_service import ServedTransport, opened
from support.server.tokens import TOKENS, line

from tensorferry.server.app import App
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.inference.shared_memory.regions import Regions
from tensorferry.server.models.config_pbtxt.pbtxt import parse_config
from tensorferry.server.models.lifecycle import loader
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.server.runtime.devices import choose_device
from tensorferry.server.runtime.files import fp16
from tensorferry.server.runtime.session import Session
from tensorferry.server.security import access_control


@pytest.fixture(autouse=True)
def check_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of checks of the test's own, because many tests replace what the checks find."""
    folder = tmp_path_factory.mktemp("cache")
    # The fixture monkeypatch would otherwise be undone after a test's other fixtures, and hold what it replaced.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "tensorferry"


@pytest.fixture(autouse=True)
def patient_checks() -> Iterator[None]:
    """Let the checks of a load take longer than a second, because the machine may be busy."""
    defaults = LoadBudget.__init__.__defaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadBudget.__init__, "__defaults__", (PATIENCE, *defaults[1:]))
        yield


@pytest.fixture
def served(transport: str) -> Iterator[ServedTransport]:
    """A scripted service behind a real transport; the test fails if a thread or a call remains."""
    yield from opened(transport)


@pytest.fixture
def serve(transport: str) -> Iterator[Callable[..., ServedTransport]]:
    """The same, with the test's own limits and callbacks."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(contextmanager(opened)(transport, **options))


@pytest.fixture
def make(tmp_path: Path, transport: str) -> Iterator[Make]:
    """Make servers with the model `m`, y = 2 x, on a free port; they are stopped after the test."""
    with made_apps(small.twice(tmp_path / "m.onnx")) as made:
        yield partial(made, transport=transport)


@pytest.fixture
def start(make: Make) -> Make:
    """The same, started and loaded."""

    def started(**options: Any) -> App:
        app = make(**options)
        app.start()
        app.load()
        return app

    return started


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Load the model of a builder, with the text of a config.pbtxt; its batcher is closed after the test.

    With a `directory`, the model is one of a repository.
    """
    loaded: list[Model] = []

    def make(
        build: Callable[[Path], Path],
        config: str | None = None,
        *,
        name: str = "m",
        directory: Path | None = None,
        new_budget: Callable[[], LoadBudget] = LoadBudget,
        **options: Any,
    ) -> Model:
        parsed = parse_config(config, "test") if config is not None else None
        source = ModelSource(name, build(tmp_path / "m.onnx"), config=parsed, directory=directory)
        options_of_server = ServerConfig((source,), **options)
        devices = {options_of_server.device: choose_device(options.get("device", "cpu"))}
        loaded.append(
            loader.load_model(source, LoadContext(options_of_server, devices, new_budget=new_budget))
        )
        return loaded[-1]

    yield make
    for model in loaded:
        assert model.batcher.close()
        model.release()


@pytest.fixture
def device() -> CountingDeviceMemory:
    return CountingDeviceMemory()


@pytest.fixture
def on_device(device: CountingDeviceMemory, monkeypatch: pytest.MonkeyPatch) -> CountingDeviceMemory:
    """Load models on this device."""
    staged = partial(Session, memory=device)
    monkeypatch.setattr(fp16, "Session", staged)
    return device


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory for temporary files."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def reload_on_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read changed credential files at every call, not at most once a second."""
    monkeypatch.setattr(access_control, "_RELOAD_SECONDS", 0.0)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """The token file of `TOKENS`."""
    path = tmp_path / "tokens"
    path.write_text("".join(line(f"of-{n}", roles, token) for n, (roles, token) in enumerate(TOKENS.items())))
    return path


@pytest.fixture
def regions(tmp_path: Path) -> Regions:
    """Regions that clients may register, in a directory with the file `key` of 64 bytes."""
    (tmp_path / "key").write_bytes(bytes(range(64)))
    return Regions(allowed=True, directory=tmp_path)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[ScriptedRepository]:
    """An empty repository with its controller."""
    (tmp_path / "models").mkdir()
    repository = ScriptedRepository(tmp_path / "models")
    yield repository
    repository.close()
