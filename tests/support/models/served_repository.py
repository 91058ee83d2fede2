"""A model repository on disk, and a server of it without a transport, with real models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from support.server.rig import PATIENCE, Array, fp32, infer, request, spec

from tensorferry.batcher import Batcher
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.protos.model_config_pb2 import TYPE_FP32, ModelConfig
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry, ModelState
from tensorferry.server.models.repository.repository import Repository
from tensorferry.server.models.repository.repository_control import RepositoryController
from tensorferry.server.signature import Signature


class ServedRepository:
    """A repository on disk, and a server of it without a transport."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.registry = ModelRegistry()
        self.service = InferenceService(self.registry)
        self._context = LoadContext(ServerConfig(()), registry=self.registry)
        # Runs the model "gated", once it is loaded.
        self.runner = ScriptedRunner(lambda x: {"y": x["x"] * 2}, gated=True)
        self.control: RepositoryController

    def _load(self, source: ModelSource) -> Model:
        if source.name != "gated":
            return load_model(source, self._context)
        tensors = Signature((spec("x", "FP32", "", 3),), (spec("y", "FP32", "", 3),))
        config = ModelConfig(name="gated", max_batch_size=8)
        config.input.add(name="x", data_type=TYPE_FP32, dims=[3])
        config.output.add(name="y", data_type=TYPE_FP32, dims=[3])
        return Model("gated", "1", tensors, 8, "", Batcher(self.runner, 8, name="gated"), config=config)

    def write(
        self, name: str, build: Callable[[Path], Path] | None = None, config: str = "", version: int = 1
    ) -> None:
        directory = self.root / name / str(version)
        directory.mkdir(parents=True, exist_ok=True)
        if build is not None:
            build(directory / "new").rename(directory / "model.onnx")
        if config:
            (self.root / name / "config.pbtxt").write_text(config)

    def start(
        self,
        *names: str,
        mode: str = "explicit",
        strict: bool = True,
        named: Sequence[ModelSource] = (),
        poll_seconds: float = 3600.0,
    ) -> RepositoryController:
        self.control = RepositoryController(
            self.registry,
            Repository([self.root]),
            self._load,
            lambda name: None,
            mode=mode,
            poll_seconds=poll_seconds,
        )
        self.control.start(named, names, strict=strict)
        self.registry.mark_complete()
        self.service.models_changed()
        return self.control

    def write_code(
        self, name: str, code: str, config: str = "", version: int = 1, file: str = "model.py"
    ) -> None:
        self.write(name, None, config, version)
        new = self.root / name / str(version) / f"{file}.new"
        new.write_text(code)
        new.rename(new.with_suffix(""))

    def ask(self, model: str = "e", x: Array | None = None, *, name: str = "image") -> Array:
        """Return the first output of a model for this input, by default of two rows."""
        given = fp32(2, 3) if x is None else x
        response = infer(self.service, request({name: given}, model=model))
        output = response.outputs[0]
        return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(output.shape)

    def states(self) -> dict[str, ModelState]:
        return {entry.name: entry.state for entry in self.registry.entries()}

    def close(self) -> None:
        self.runner.open()
        assert self.control.close(PATIENCE)
        for model in self.registry.models():
            assert model.batcher.close()
            model.release()

    def reason(self, name: str = "e") -> str:
        return next(entry.reason for entry in self.registry.entries() if entry.name == name)
