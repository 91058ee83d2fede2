"""An engine without front-ends: this process sends it tensors through links, as front-ends do."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from serving.encodings import grpc_message, grpc_output
from serving.processes import cpu_seconds
from serving.servers import HOST, MAX_BATCH_SIZE
from serving.workloads import TINY, TINY_SIZES
from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.link import FrontEndLink, create_link
from tensorferry.server.link_messages import ANSWERED
from tensorferry.server.supervisor.child import Child

LINKS = 2
_START_SECONDS = 60.0


@contextmanager
def engine_alone(model: Path, core: int) -> Iterator[tuple[int, Sequence[FrontEndLink]]]:
    """Run an engine on a core, as a supervisor would, and yield its process id and its links."""
    allowed = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        os.sched_setaffinity(0, {core})
        try:
            options = ["--device", "cpu", "--max-batch-size", str(MAX_BATCH_SIZE), "--log-level", "warning"]
            child = Child(
                "tensorferry.server.engine",
                [f"{TINY.model}={model}", *options, "--front-ends", str(LINKS)],
                small_only=False,
            )
        finally:
            os.sched_setaffinity(0, allowed)
        try:
            child.channel.set_blocking(True)
            start = {
                "generation": 1,
                "port": 0,
                "address": HOST,
                "socket": f"{folder}/engine",
                "front_ends": LINKS,
            }
            child.send("start", {**start, "log_levels": None, "metrics_fd": None, "trial": False})
            links = []
            for number in range(LINKS):
                files = create_link()
                links.append(FrontEndLink(files.duplicate()))
                child.send("link", {"front_end": number, "generation": 1}, files)
            while (message := child.receive()) is not None and message.kind != "ready":
                if message.kind == "failed":
                    raise SystemExit(f"the engine has not started: {message.fields}")
            yield child.pid, links
        finally:
            child.kill()
            child.wait(_START_SECONDS)
            child.reap()


def engine_cpu_us(pid: int, links: Sequence[FrontEndLink], in_flight: int, seconds: float) -> float:
    """Return the engine's processor time per request, with the same number in flight on each link."""
    message = grpc_message(TINY, TINY.row())
    for link in links:
        for _ in range(in_flight // len(links)):
            link.submit(message)
        link.flush()
    until = time.monotonic() + seconds
    used = cpu_seconds([pid])
    done = 0
    while time.monotonic() < until:
        for link in links:
            responses = link.receive()
            for _, code, payload, _ in responses:
                if code != ANSWERED:
                    raise SystemExit(f"the engine answered {payload!r}")
                link.submit(message)
            link.flush()
            done += len(responses)
    used = cpu_seconds([pid]) - used
    # The next measurement begins without a request in flight.
    for link in links:
        while link.in_flight:
            for _, _, payload, _ in link.receive():
                if len(grpc_output(pb.ModelInferResponse.FromString(payload))) != TINY_SIZES[-1]:
                    raise SystemExit(f"not a right answer: {payload!r}")
    return 1e6 * used / done
