"""In any order in which threads continue at locks, each accepted request of a pipeline ends exactly once, as it should.

Each seed is another pipeline and another interleaving of callers, workers and a closer, in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.batcher.rig import figures_add_up, new_request
from support.batcher.scenario import MOST_ROWS, Scenario, Sent, play

from tensorferry.batcher import Batcher, Pipeline, QueueFull, Request, Stage, StageModel

# The stages of each shape: what each reads and gives.
SHAPES: Mapping[str, Mapping[str, tuple[tuple[str, ...], str]]] = {
    "line": {"a": (("x",), "m"), "b": (("m",), "y")},
    "long": {"a": (("x",), "m"), "b": (("m",), "n"), "c": (("n",), "y")},
    "fork": {"a": (("x",), "m"), "b": (("x",), "n"), "join": (("m", "n"), "y")},
    "diamond": {"a": (("x",), "k"), "b": (("k",), "m"), "c": (("k",), "n"), "join": (("m", "n", "k"), "y")},
}
# A request whose second column has the number of a stage fails in that stage.
STEPS: Mapping[str, tuple[float, Callable[..., Any]]] = {
    "a": (1.0, lambda x: x + 1),
    "b": (2.0, lambda x: x * 2),
    "c": (3.0, lambda x: x - 3),
    "join": (4.0, lambda *values: sum(values)),
}
HEALTHY = 0.0


class PipelineScenario(Scenario):
    turns = 6

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(seed, monkeypatch)
        self.shape = SHAPES[self.random.choice(list(SHAPES))]
        # Stages whose batchers belong to others.
        self.others = {name for name in self.shape if self.random.random() < 0.25}
        self.attending = self.random.random() < 0.3
        self.running = dict.fromkeys(self.shape, 0)
        self.batchers: dict[str, Batcher] = {}

    def model_fn(self, name: str) -> Callable[[Any], Any]:
        number, step = STEPS[name]
        seconds = self.random.choice([0.001, 0.01])

        def run(inputs: Mapping[str, Any]) -> Any:
            self.running[name] += 1
            assert self.running[name] == 1, "one thread at a time"
            values = list(inputs.values())
            self.interleaver.sleep(seconds * (1 + 0.1 * len(values[0])))
            self.running[name] -= 1
            if (values[0][:, 1] == number).any():
                raise ValueError(name)
            value = step(*[array[:, 0] for array in values])
            return {"out": np.stack([value, values[0][:, 1]], axis=1)}

        return run

    def make(self) -> Pipeline:
        clock, stages = self.interleaver.clock, []
        for name, (reads, gives) in self.shape.items():
            batcher = self.batchers[name] = Batcher(
                self.model_fn(name),
                self.random.choice([2, 4]),
                max_queue_size=MOST_ROWS,
                clock=clock,
                name=name,
                pipelined=self.random.random() < 0.2,
            )
            model: Any = partial(StageModel, batcher) if name in self.others else batcher
            inputs = {f"in{at}": tensor for at, tensor in enumerate(reads)}
            stages.append(Stage(name, model, inputs, {"out": gives}))
        return Pipeline("p", stages, inputs=["x"], outputs=["y"], clock=clock)

    def main(self) -> None:
        super().main()
        for name in self.others:
            assert self.batchers[name].close()

    def new_sent(self, number: int, deadline: float) -> Sent:
        tag, rows = 100.0 + 10 * number + self.random.randrange(7), self.random.choice([1, 1, 1, 2, 3, 6])
        fault = self.random.choice(list(self.shape)) if self.random.random() < 0.15 else None
        x = np.array([[tag, STEPS[fault][0] if fault else HEALTHY]] * rows)
        return Sent(new_request({"x": x}, deadline=deadline), deadline, tag, fault)

    def enqueue(self, number: int, request: Request) -> None:
        if self.served.enqueue(request, notify=not self.attending):
            assert self.attending
            self.run_inline(1.0)

    def check_answer(self, sent: Sent, outputs: Any) -> None:
        tensors = {"x": sent.tag}
        for name, (reads, gives) in self.shape.items():
            tensors[gives] = STEPS[name][1](*[tensors[tensor] for tensor in reads])
        assert outputs["y"].tolist() == [[tensors["y"], HEALTHY]] * sent.request.rows

    def check_error(self, error: BaseException) -> None:
        # No stage of its own refuses what was accepted.
        if not (self.others and isinstance(error, QueueFull)):
            super().check_error(error)

    def check(self) -> None:
        super().check()
        for sent in self.sent:
            assert (sent.request.pipeline_run, sent.request.tensors) == (None, ())
            if (outcome := sent.outcomes[0][1]).error is None:
                assert [stage.batch is not None for stage in outcome.stages] == [True] * len(self.shape)
        for counts in self.served.stage_statistics().values():
            figures_add_up(counts)


@pytest.mark.parametrize("block", range(5))
def test_in_whatever_order_threads_go_on_each_request_ends_once(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(range(30 * block, 30 * (block + 1)), monkeypatch, PipelineScenario)
