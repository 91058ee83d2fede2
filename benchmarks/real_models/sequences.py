"""Voice activity of silero-vad with states in the server, beside clients that send their states with each call.

    python -m real_models.sequences --files FOLDER --load PROGRAM [--rounds N]

First 64 streams of generated sound are compared with ONNX Runtime whose caller keeps the states. Then the load generator
sends calls of 64 sequences in turn to both servers, one after the other.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np
import onnxruntime

from real_models.answers import Reference
from real_models.catalogue import MODELS, Array
from real_models.servers import started, status
from serving.encodings import ID, grpc_frame
from serving.load import UNARY_PATH, Load, shape_of
from serving.measure import Bench
from serving.plan import UNARY
from serving.processes import Cores, Running
from serving.run import cache_folder
from serving.servers import HOST
from tensorferry.client import InferenceClient
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos.tensors import datatype_of, encode_raw

_MODEL, _STATE, _NEXT = "silero_half", "state", "stateN"
_SEQUENCES, _CHUNKS = 64, 40
_IN_FLIGHT = (8, 64)
_SECONDS, _WARM_UP = 4.0, 2.0


def main() -> None:
    """Compare, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=Path, required=True, help="the packages, installed by make")
    parser.add_argument("--load", type=Path, required=True, help="the load generator, built by make")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: %(default)s)")
    arguments = parser.parse_args()
    cache, cores = cache_folder(), Cores.split()
    bench = Bench(cache, arguments.load.resolve(), cores)
    (model,) = (each for each in MODELS if each.name == _MODEL)
    path = model.path(arguments.files.resolve(), cache)
    reference = Reference(model, path, 2)
    options = ["--threads", "1", "--state", f"{_STATE}={_NEXT}"]
    os.sched_setaffinity(0, {cores.load})
    with (
        started(bench, reference, path, *options, checks=False) as (keeping, _),
        started(bench, reference, path, "--threads", "1") as (sending, _),
    ):
        difference = _largest_difference(path, keeping)
        print(f"{_SEQUENCES} streams of {_CHUNKS} chunks: largest difference {difference:.1e}", flush=True)
        for in_flight in _IN_FLIGHT:
            ratios = []
            for number in range(arguments.rounds):
                rates = {}
                servers = [(keeping, False), (sending, True)]
                for serving, states in servers[::-1] if number % 2 else servers:
                    if not states:
                        # The load generator cancels its last calls, which ends their sequences.
                        _begin(serving)
                    rates[states] = _rate(bench, serving, in_flight, states=states)
                ratios.append(rates[False] / rates[True])
                print(
                    f"{in_flight} in flight: kept {rates[False]:.0f}/s, sent {rates[True]:.0f}/s", flush=True
                )
            print(
                f"{in_flight} in flight: kept / sent {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        batches = status(keeping)["batches"]
        print(f"{batches['rows'] / batches['ran']:.1f} rows a batch with states in the server")


def _sound(number: int) -> Array:
    """Return the chunks of a stream: tones and noise that come and go."""
    random = np.random.default_rng(number)
    time = np.arange(_CHUNKS * 576) / 16000
    loud = random.random(_CHUNKS).repeat(576)
    sound = loud * np.sin(2 * np.pi * random.integers(80, 400) * time) + 0.05 * random.standard_normal(
        len(time)
    )
    chunks: Array = sound.astype(np.float32).reshape(_CHUNKS, 1, 576)
    return chunks


def _largest_difference(path: Path, serving: Running) -> float:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(number: int) -> float:
        state, worst = np.zeros((2, 1, 128), np.float32), 0.0
        with client.sequence(_MODEL) as sequence:
            for chunk in _sound(number):
                got = sequence.infer({"input": chunk})["output"]
                right, state = session.run(["output", _NEXT], {"input": chunk, _STATE: state})
                worst = max(worst, float(np.abs(got - right).max()))
        return worst

    with InferenceClient(f"{HOST}:{serving.port}") as client, ThreadPoolExecutor(_SEQUENCES) as callers:
        return max(callers.map(run, range(_SEQUENCES)))


def _message(number: int, inputs: Mapping[str, Array], **flags: bool) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=_MODEL, id=ID)
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        request.raw_input_contents.append(encode_raw(array))
    if _STATE not in inputs:
        request.parameters["sequence_id"].int64_param = number + 1
    for name, value in flags.items():
        request.parameters[name].bool_param = value
    return request


def _messages(*, states: bool, **flags: bool) -> Sequence[bytes]:
    state = {_STATE: np.zeros((2, 1, 128), np.float32)} if states else {}
    return [
        _message(number, {"input": _sound(number)[0], **state}, **flags).SerializeToString()
        for number in range(_SEQUENCES)
    ]


def _begin(serving: Running) -> None:
    with grpc.insecure_channel(f"{HOST}:{serving.port}") as channel:
        infer: Any = channel.unary_unary(UNARY_PATH)
        for message in _messages(states=False, sequence_start=True):
            infer(message, timeout=60)


def _rate(bench: Bench, serving: Running, in_flight: int, *, states: bool) -> float:
    body = bench.cache / "bodies" / f"sequences-{states}"
    body.parent.mkdir(exist_ok=True)
    body.write_bytes(b"".join(map(grpc_frame, _messages(states=states))))
    load = Load(
        serving.port, UNARY_PATH, body, shape_of(UNARY, in_flight, False), _SECONDS, _WARM_UP, least_bytes=4
    )
    row = bench.measured(serving, load)
    if row["errors"] or row["unanswered"]:
        raise SystemExit(f"{row['errors']} errors, {row['unanswered']} unanswered: {row['last_message']}")
    return float(row["rate"])


if __name__ == "__main__":
    main()
