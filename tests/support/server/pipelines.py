"""A model that is a pipeline, with branches and with a stage of two steps, for tests of what is said about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from support.server.rig import signature, spec

from tensorferry.batcher import Batcher, Pipeline, Stage
from tensorferry.batcher.testing import ScriptedRunner
from tensorferry.server.models.lifecycle.model import Model, ModelStep
from tensorferry.server.processes.functions.worker_process import WorkerProcess
from tensorferry.server.python.steps.stage_function import StageFunction, StageStep, StepTimes

Function = Callable[[Mapping[str, Any]], Mapping[str, Any]]


# Never started.
PROCESS = WorkerProcess(Path("app.py"), "clean", name="clean")


class BranchedModel:
    """The model p: stage "clean+split" feeds the stages "encode" and "count". The test releases the batches of `encode`.

    x → clean → y → split → words → encode → vector
                                  → count → number
    """

    def __init__(
        self, *, gated: bool = True, name: str = "p", processes: tuple[WorkerProcess, ...] = ()
    ) -> None:
        self.encode = ScriptedRunner(lambda inputs: {"vector": inputs["words"] * 2}, gated=gated)
        first, second = StepTimes(), StepTimes()
        both = StageFunction(
            name,
            [
                StageStep("clean", lambda inputs: {"y": inputs["x"]}, times=first),
                StageStep("split", lambda inputs: {"words": inputs["y"] + 1}, times=second),
            ],
            ("words",),
        )
        self.batchers = {
            "clean+split": Batcher(both, 8, name="clean+split"),
            "encode": Batcher(self.encode, 4, name="encode"),
            "count": Batcher(_counted, 8, name="count"),
        }
        stages = [
            Stage("clean+split", self.batchers["clean+split"], {"x": "x"}, {"words": "words"}),
            Stage("encode", self.batchers["encode"], {"words": "words"}, {"vector": "vector"}),
            Stage("count", self.batchers["count"], {"words": "words"}, {"number": "number"}),
        ]
        self.pipeline = Pipeline(name, stages, inputs=["x"], outputs=["vector", "number"])
        self.model = Model(
            name,
            "1",
            signature(
                spec("x", "FP64", "b"), outputs=(spec("vector", "FP64", "b"), spec("number", "FP64", "b"))
            ),
            8,
            "in batches",
            self.pipeline,
            devices=("cpu", "cuda:1", "cpu"),
            steps=(
                ModelStep("clean", "python", "clean+split", {"x": "x"}, {"y": "y"}, (first,), processes),
                ModelStep("split", "python", "clean+split", {"y": "y"}, {"words": "words"}, (second,)),
                ModelStep(
                    "encode", "onnx", "encode", {"words": "words"}, {"vector": "vector"}, (StepTimes(),)
                ),
                ModelStep(
                    "count", "python", "count", {"words": "words"}, {"number": "number"}, (StepTimes(),)
                ),
            ),
        )

    def submit(self, rows: int = 1, **options: Any) -> Any:
        """Enqueue a request; return its future."""
        return self.pipeline.submit_rows({"x": np.zeros(rows)}, **options)

    def close(self) -> None:
        """Let all batches end, and close the pipeline."""
        self.encode.open()
        assert self.pipeline.close()


def _counted(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"number": inputs["words"]}
