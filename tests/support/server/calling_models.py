"""Models whose functions call each other, without a transport."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorferry.batcher import Batcher, Outcome, Request, Tensor
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.inference.calls.model_calls import ModelCalls
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.models.lifecycle.load_context import LoadContext
from tensorferry.server.models.lifecycle.loader import load_model
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.observability.tracing.trace import Tracer
from tensorferry.server.python.steps.named_model import ModelReference
from tensorferry.server.runtime.axes import EmptyAxes
from tensorferry.server.signature import Signature
from tensorferry.serving import submit

Array = npt.NDArray[Any]
Inputs = Mapping[str, npt.ArrayLike]


class Observed:
    """A model function that keeps the requests of its batches, and may do something in them."""

    def __init__(self, run: Callable[[Mapping[str, Array]], Any]) -> None:
        self._run = run
        self.batches: list[list[Request]] = []
        self.rows: list[int] = []

    def run_batch(self, inputs: Mapping[str, Array], requests: Sequence[Request], /) -> Any:
        self.batches.append(list(requests))
        self.rows.append(sum(request.rows for request in requests))
        return self._run(inputs)


class World:
    """A registry with models that can call each other."""

    def __init__(self) -> None:
        self.registry = ModelRegistry()
        self.tracer = Tracer()
        self.calls = ModelCalls(self.registry, self.tracer)
        self.service = InferenceService(self.registry, tracing=self.tracer)
        self._made: list[Model] = []

    def add(
        self,
        name: str,
        run: Any,
        signature: Signature,
        *,
        version: str = "1",
        max_batch_size: int = 8,
        steps: Sequence[str] = (),
        empty_axes: EmptyAxes | None = None,
        **options: Any,
    ) -> Model:
        """Serve a model that runs this."""
        model = Model(
            name,
            version,
            signature,
            max_batch_size,
            "",
            Batcher(run, max_batch_size, **options),
            empty_axes=empty_axes or EmptyAxes(),
            uses=tuple(ModelReference(step, "", signature, batched=max_batch_size > 0) for step in steps),
        )
        self._serve(model)
        return model

    def load(self, declared: Any, **options: Any) -> Model:
        """Serve a declared function."""
        source = ModelSource(declared.name, Path("app.py"), declaration=declared)
        config = ServerConfig((source,), **options)
        context = LoadContext(config, calls=self.calls.of_batch, registry=self.registry)
        model = load_model(source, context)
        self._serve(model)
        return model

    def _serve(self, model: Model) -> None:
        self._made.append(model)
        self.registry.mark_ready(model)

    def close(self) -> None:
        """End all models."""
        for model in self._made:
            model.batcher.close(drain=False, timeout=0.0)
        for model in self._made:
            assert model.batcher.close(drain=False)
            model.release()

    def call(
        self, name: str, inputs: Inputs, *requests: Request, caller: str = "caller", **options: Any
    ) -> Any:
        """What a function of the model `caller` gets that runs for these requests."""
        with self.calls.of_batch(caller, requests or (request(),)):
            return submit(name, inputs, **options).result()

    def caller(self, model: str, *requests: Request) -> Any:
        """A context in which the model's function runs for these requests."""
        return self.calls.of_batch(model, requests or (request(),))


def request(deadline: float = math.inf, **options: Any) -> Request:
    """A request that a function runs for."""
    tensor = Tensor(np.dtype("f4"), (1,), np.zeros(1, np.float32))

    def complete(outcome: Outcome) -> None:
        pass

    return Request((tensor,), complete, names=("x",), rows=1, nbytes=4, deadline=deadline, **options)
