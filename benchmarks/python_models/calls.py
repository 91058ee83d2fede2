"""Requests with their right answers, loads of them, and servers of the apps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from serving.encodings import ID, grpc_frame
from serving.load import UNARY_PATH, Load, LoadError, Shape
from serving.measure import Bench
from serving.probe import ask_grpc, compare
from serving.processes import Running
from serving.servers import HOST, MAX_BATCH_SIZE
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc
from tensorferry.protos.tensors import datatype_of, encode_raw

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a model that has one output, and the right answer."""

    model: str
    inputs: Mapping[str, Array]
    answer: Array

    def message(self) -> bytes:
        """Return the ModelInferRequest."""
        request = pb.ModelInferRequest(model_name=self.model, id=ID)
        for name, array in self.inputs.items():
            request.inputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
            request.raw_input_contents.append(encode_raw(array))
        return request.SerializeToString()

    def check(self, port: int) -> None:
        """Raise WrongAnswer if the server answers wrongly."""
        compare(ask_grpc(self.message(), port), np.ravel(self.answer))


def load_of(
    bench: Bench, serving: Running, calls: Sequence[Call], shape: Shape, seconds: float, warm_up: float
) -> Load:
    """Return a load of these calls in turn, with its body written to the cache."""
    body = bench.cache / "bodies" / f"python-{calls[0].model}-{calls[0].answer.shape[0]}"
    body.parent.mkdir(exist_ok=True)
    body.write_bytes(b"".join(grpc_frame(call.message()) for call in calls))
    least = min(call.answer.nbytes for call in calls)
    return Load(serving.port, UNARY_PATH, body, shape, seconds, warm_up, least_bytes=least)


def measured(
    bench: Bench,
    serving: Running,
    calls: Sequence[Call],
    shape: Shape,
    seconds: float,
    warm_up: float,
    answers: int = 0,
) -> Mapping[str, Any]:
    """Return the results of a load of these calls in turn, which ends after `answers` if given. LoadError if a call fails."""
    load = load_of(bench, serving, calls, shape, seconds, warm_up)
    row = bench.measured(serving, replace(load, calls=answers))
    check_all_answered(row)
    return row


def check_all_answered(row: Mapping[str, Any]) -> None:
    """Raise LoadError if a call failed."""
    if row["errors"] or row["unanswered"]:
        raise LoadError(f"{row['errors']} errors, {row['unanswered']} unanswered: {row['last_message']}")


@contextmanager
def started(
    bench: Bench, command: Sequence[str], peer: str, variables: Mapping[str, str], calls: Sequence[Call]
) -> Iterator[Running]:
    """Run a server of Python until the block ends; it begins when all these calls are answered rightly."""
    port = bench.spare_port

    def ready() -> None:
        for call in calls:
            call.check(port)

    words = [str(bench.python(peer)), *(word.format(port=port) for word in command)]
    with bench.command_started(words, port, peer, variables, ready) as (serving, _):
        yield serving


def app_command(name: str) -> Sequence[str]:
    """Return the command that serves an app with tensorferry."""
    app = str(Path(__file__).with_name("apps") / f"{name}.py")
    options = ["--device", "cpu", "--max-batch-size", str(MAX_BATCH_SIZE), "--log-level", "warning"]
    return ["-m", "tensorferry.server", "serve", app, "--host", HOST, "--port", "{port}", *options]


def computed(port: int, model: str) -> tuple[int, float]:
    """Return how many rows tensorferry has computed with a model, and in how many seconds."""
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        ask: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStatistics
        (found,) = ask(pb.ModelStatisticsRequest(name=model), timeout=20).model_stats
    return found.inference_count, sum(batch.compute_infer.ns for batch in found.batch_stats) / 1e9
