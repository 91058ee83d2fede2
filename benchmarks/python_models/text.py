"""Sentence encoder behind its tokenizer: beside the encoder alone, and batches by length beside arrival order.

Texts come one a call, or many.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from python_models.calls import Call, app_command, check_all_answered, load_of, measured, started
from serving.load import shape_of
from serving.measure import Bench
from serving.peers.settings import session_options
from serving.processes import Running

Row = Mapping[str, Any]

PART = "text"
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "embeddings" / "model"
ENCODER, EMBED, ARRIVAL = "encoder", "embed", "arrival"
EQUAL, MIXED, ENDPOINT = "equal", "mixed", "endpoint"
GRPC, ENCODINGS = "gRPC", ("base64", "float")
EQUAL_TOKENS = 32
SHORTEST, LONGEST = 3, 128
IN_FLIGHT = 64
# Texts of a large call; one is in flight.
LARGE = (64, 256, 1024)
_TEXTS = 256
_CHECKED = 8
_FIGURES = ("rate", "p50_ms", "p99_ms", "cpu_us_per_answer", "other_cores")
_SECONDS, _WARM_UP = 8.0, 1.5
# Texts in all large calls of one measurement, and the seconds that it may take.
_LARGE_TEXTS, _LARGE_SECONDS = 2048, 300.0
# Each is one token, so the length of a text is known.
_WORDS = [
    "the", "of", "and", "to", "in", "a", "is", "for", "on", "that", "with", "by", "this", "it", "from",
    "at",
]  # fmt: skip


def missing() -> str:
    """Return why text cannot be measured, "" if it can."""
    if find_spec("tokenizers") is None:
        return "the package tokenizers is not installed"
    absent = [name for name in ("minilm.onnx", "tokenizer.json") if not (FOLDER / name).exists()]
    return f"{', '.join(absent)} are not in examples/embeddings (make embeddings)" if absent else ""


def texts(tokens: Sequence[int]) -> list[str]:
    """Return seeded texts of these numbers of tokens, with the two that the tokenizer adds."""
    random = np.random.default_rng(4)
    return [" ".join(random.choice(_WORDS, count - 2)) for count in tokens]


def lengths(kind: str) -> list[int]:
    """Return the numbers of tokens of the texts."""
    if kind == EQUAL:
        return [EQUAL_TOKENS] * _TEXTS
    return [int(count) for count in np.random.default_rng(5).integers(SHORTEST, LONGEST + 1, _TEXTS)]


def calls(kind: str) -> dict[str, list[Call]]:
    """Return the calls with texts by model, and for the encoder with their tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.no_padding()
    session = onnxruntime.InferenceSession(
        str(FOLDER / "minilm.onnx"), session_options(), providers=["CPUExecutionProvider"]
    )
    found: dict[str, list[Call]] = {ENCODER: [], EMBED: [], ARRIVAL: []}
    tokens = lengths(kind)
    for text, count in zip(texts(tokens), tokens, strict=True):
        ids = np.array([tokenizer.encode(text).ids])
        if ids.shape[1] != count:
            raise ValueError(f"{ids.shape[1]} tokens, not {count}: {text!r}")
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        answer = np.asarray(session.run(None, inputs)[0])
        found[ENCODER].append(Call(ENCODER, inputs, answer))
        for model in (EMBED, ARRIVAL):
            found[model].append(Call(model, {"text": np.array([text], object)}, answer))
    return found


def large(some: Sequence[Call], count: int) -> Call:
    """Return one call with the texts of these calls, in turn until there are `count`."""
    chosen = [some[at % len(some)] for at in range(count)]
    text = np.concatenate([call.inputs["text"] for call in chosen])
    return Call(chosen[0].model, {"text": text}, np.concatenate([call.answer for call in chosen]))


def measure(bench: Bench, number: int, shortened: float) -> Iterator[Row]:
    """Yield one round: texts per second of each model, with texts of equal and of mixed lengths."""
    all_calls = {kind: calls(kind) for kind in (EQUAL, MIXED)}
    checked = [
        call for by_model in all_calls.values() for some in by_model.values() for call in some[:_CHECKED]
    ]
    checked.append(large(all_calls[MIXED][EMBED], LARGE[0]))
    loads = [(EQUAL, ENCODER), (EQUAL, EMBED), (MIXED, EMBED), (MIXED, ARRIVAL)]
    http = bench.spare_port
    command = [*app_command("text"), "--http-port", str(http)]
    with started(bench, command, "", {"SERVING_BENCH_MODEL": str(FOLDER)}, checked) as serving:
        for kind, model in loads[::-1] if number % 2 else loads:
            some = all_calls[kind][model]
            shape = shape_of("unary", IN_FLIGHT, False)
            row = measured(bench, serving, some, shape, _SECONDS * shortened, _WARM_UP * shortened)
            figures = {name: row[name] for name in _FIGURES}
            print(
                f"text, {kind} lengths, {model:8s} {row['rate']:7.0f}/s  p50 {row['p50_ms']:.1f} ms",
                flush=True,
            )
            yield {"part": PART, "round": number, "model": model, "lengths": kind, **figures}
        yield from _measure_endpoint(bench, serving, http, all_calls[EQUAL][EMBED][0], number, shortened)
        yield from _measure_large(bench, serving, all_calls[MIXED], number, shortened)


def _measure_endpoint(
    bench: Bench, serving: Running, http: int, call: Call, number: int, shortened: float
) -> Iterator[Row]:
    """Yield the texts per second of /v1/embeddings in each encoding, and of the same call over gRPC."""
    over_grpc = load_of(bench, serving, [call], shape_of("unary", IN_FLIGHT, False), _SECONDS, _WARM_UP)
    loads = {GRPC: over_grpc}
    for encoding in ENCODINGS:
        fields = {"model": EMBED, "input": call.inputs["text"].item(), "encoding_format": encoding}
        body = bench.cache / "bodies" / f"python-{encoding}"
        body.write_text(json.dumps(fields))
        loads[encoding] = replace(
            over_grpc,
            port=http,
            path="/v1/embeddings",
            body=body,
            shape=shape_of("unary", IN_FLIGHT, True),
            content_type="application/json",
            least_bytes=call.answer.nbytes,
        )
    for name in list(loads)[::-1] if number % 2 else loads:
        load = replace(loads[name], seconds=_SECONDS * shortened, warm_up=_WARM_UP * shortened)
        row = bench.measured(serving, load)
        check_all_answered(row)
        figures = {field: row[field] for field in _FIGURES}
        print(f"text, one call over {name:8s} {row['rate']:7.0f}/s  p50 {row['p50_ms']:.1f} ms", flush=True)
        yield {"part": PART, "round": number, "model": name, "lengths": ENDPOINT, **figures}


def _measure_large(
    bench: Bench, serving: Running, some: Mapping[str, Sequence[Call]], number: int, shortened: float
) -> Iterator[Row]:
    for count in LARGE:
        for model in (ARRIVAL, EMBED) if number % 2 else (EMBED, ARRIVAL):
            call = large(some[model], count)
            answers = max(1, round(_LARGE_TEXTS * shortened / count))
            row = measured(bench, serving, [call], shape_of("unary", 1, False), _LARGE_SECONDS, 0.0, answers)
            # The row's rate has too few digits for calls that take seconds.
            rate = count * row["answers"] / row["seconds"]
            figures = {name: row[name] for name in ("p50_ms", "p99_ms", "other_cores")}
            figures["cpu_us_per_answer"] = 1e6 * row["server_cores"] / rate
            print(f"text, calls of {count} texts, {model:8s} {rate:7.1f} texts/s", flush=True)
            yield {"part": PART, "round": number, "model": model, "lengths": count, "rate": rate, **figures}
