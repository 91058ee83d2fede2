"""Closed and open loops over gRPC, cheap enough that the server is the bottleneck.

Requests are serialised before the run, and responses are parsed after it. In an open loop the send
times are fixed before the run. A latency counts from the intended send time, so a late load
generator cannot hide queueing.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

import grpc

METHOD = "/inference.GRPCInferenceService/ModelInfer"
PUSHBACK = "grpc-retry-pushback-ms"

# Outcomes of a request. Expired by the server: the server reported that the deadline cannot be met.
# Expired by the client: the client's timer ended first. All others are gRPC status names.
ON_TIME, LATE, REFUSED = "on time", "late", "refused"
BY_SERVER, BY_CLIENT = "expired by server", "expired by client"
PROPER = (ON_TIME, LATE, REFUSED, BY_SERVER, BY_CLIENT)

Infer: TypeAlias = Callable[..., Any]


@asynccontextmanager
async def channels(address: str, number: int = 4) -> AsyncIterator[Sequence[Infer]]:
    """Open ModelInfer, from bytes to bytes, on `count` connections."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    opened = [grpc.aio.insecure_channel(address, options) for _ in range(number)]
    try:
        yield [channel.unary_unary(METHOD) for channel in opened]
    finally:
        for channel in opened:
            await channel.close()


@dataclass(slots=True)
class Answer:
    """Outcome of one request, with times in seconds of `time.perf_counter`."""

    intended: float
    sent: float
    ended: float
    fate: str
    response: bytes = b""


def fate_of(code: grpc.StatusCode, details: str, metadata: Mapping[str, object]) -> str:
    """Return the name of a status; a status that lacks its required retry time gets a name of its own."""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return REFUSED if PUSHBACK in metadata else "refused without pushback"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        # The first text is gRPC's own; the server's message names the deadline and its decision.
        return BY_CLIENT if details == "Deadline Exceeded" else BY_SERVER
    return code.name


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Return independent send times."""
    chance, times, at = random.Random(seed), [], 0.0
    while (at := at + chance.expovariate(rate)) < seconds:
        times.append(at)
    return times


async def open_loop(
    infers: Sequence[Infer],
    requests: Sequence[bytes],
    schedule: Sequence[float],
    deadline: float,
    *,
    send_deadline: bool = True,
    patience: float = 5.0,
) -> list[Answer]:
    """Send request i at schedule[i], whatever the other outcomes; return one Answer for each.

    `deadline` is in seconds from the intended time. With `send_deadline` it is sent as the gRPC
    deadline; else only the client checks it, and waits for `patience` seconds in all.
    """
    answers: list[Answer | None] = [None] * len(schedule)
    started = time.perf_counter() + 0.05

    async def send(number: int, intended: float) -> None:
        sent = time.perf_counter()
        timeout = intended + (deadline if send_deadline else deadline + patience) - sent
        fate, response = "", b""
        try:
            response = await infers[number % len(infers)](requests[number % len(requests)], timeout=timeout)
        except grpc.aio.AioRpcError as error:
            fate = fate_of(error.code(), error.details() or "", dict(error.trailing_metadata()))
        ended = time.perf_counter()
        if answers[number] is not None:
            raise AssertionError(f"request {number} was answered twice")
        fate = fate or (ON_TIME if ended <= intended + deadline else LATE)
        answers[number] = Answer(intended, sent, ended, fate, response)

    sending = set()
    for number, offset in enumerate(schedule):
        # Even if the sender is late, because the loop must read answers.
        await asyncio.sleep(max(0.0, started + offset - time.perf_counter()))
        task = asyncio.create_task(send(number, started + offset))
        sending.add(task)
        task.add_done_callback(sending.discard)
    await asyncio.gather(*sending)
    done = [answer for answer in answers if answer is not None]
    if len(done) != len(schedule):
        raise AssertionError(f"{len(schedule) - len(done)} requests have no status")
    return done


async def closed_loop(
    infers: Sequence[Infer], requests: Sequence[bytes], callers: int, seconds: float, lead_in: float = 0.3
) -> ClosedRun:
    """Run `callers` callers, each of which sends its next request after the last answer.

    Answers within the first `lead_in` seconds are not counted.
    """
    numbers = count()
    responses: list[tuple[int, bytes]] = []
    begin = time.perf_counter() + lead_in
    end = begin + seconds

    async def call(infer: Infer) -> None:
        while time.perf_counter() < end:
            number = next(numbers) % len(requests)
            response = await infer(requests[number])
            if begin <= time.perf_counter() < end:
                responses.append((number, response))

    await asyncio.gather(*(call(infers[caller % len(infers)]) for caller in range(callers)))
    return ClosedRun(seconds, responses)


@dataclass(frozen=True, slots=True)
class ClosedRun:
    """Result of a closed loop: the responses, each with the number of its request."""

    seconds: float
    responses: Sequence[tuple[int, bytes]] = field(repr=False)

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.responses) / self.seconds


@dataclass(frozen=True, slots=True)
class OpenSummary:
    """Figures of an open loop: rates per second, and latencies of answered requests in seconds."""

    offered: float
    answered: float
    on_time: float
    shares: Mapping[str, float]
    p50: float
    p99: float
    lag_p99: float


def summarize(answers: Sequence[Answer], begin: float, end: float) -> OpenSummary:
    """Count the requests intended for the time from `begin` to `end`, in seconds after the first.

    Answers count in the second in which they arrive, whenever their request was sent. So the
    queue's growth within the period is accounted for.
    """
    first = answers[0].intended
    counted = [answer for answer in answers if begin <= answer.intended - first < end]
    given = Counter(answer.fate for answer in answers if begin <= answer.ended - first < end)
    fates = Counter(answer.fate for answer in counted)
    latencies = [answer.ended - answer.intended for answer in counted if answer.fate in (ON_TIME, LATE)]
    seconds = end - begin
    return OpenSummary(
        offered=len(counted) / seconds,
        answered=(given[ON_TIME] + given[LATE]) / seconds,
        on_time=given[ON_TIME] / seconds,
        shares={fate: number / len(counted) for fate, number in fates.items()},
        p50=percentile(latencies, 50),
        p99=percentile(latencies, 99),
        lag_p99=percentile([answer.sent - answer.intended for answer in counted], 99),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that is not below `percent` percent of the values; nan without values."""
    if not values:
        return float("nan")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
