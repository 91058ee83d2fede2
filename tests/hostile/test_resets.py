"""Connections that end by RST at any step of a call leave no file open and do not count for --max-connections."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
from hostile.leaver import STEPS, Leaver, RefusedError, Wrap, secured
from polling import until
from support.processes.server import ServerProcess, running
from support.server.certificates import Issued
from support.server.rig import request

from tensorferry.client import InferenceClient, Tls
from tensorferry.server.transport.core_leaks import leaks_files

pytestmark = pytest.mark.skipif(
    leaks_files(grpc.__version__, os.environ.get("GRPC_EXPERIMENTS", "")),
    reason="this grpcio keeps the files of connections that are reset, which the server warns of",
)

RESETS = 100
MOST_CONNECTIONS = 40
# Larger than the 64 KiB that a connection may send before its client makes more room.
LARGE = request({"x": np.zeros((1, 60_000), np.float32)}, model="m").SerializeToString()


@dataclass(frozen=True)
class Target:
    """A server, and how its clients come."""

    server: ServerProcess
    wrap: Wrap | None
    tls: Tls | bool

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.server.process.pid}/fd"))

    def is_good(self) -> bool:
        with InferenceClient(self.server.address, tls=self.tls) as client:
            return client.infer("m", {"x": np.ones((1, 3), np.float32)})["y"].shape == (1, 3)


@pytest.fixture(params=["plain", "tls", "mtls"])
def target(
    request: pytest.FixtureRequest, transport: str, echo_model: Path, tmp_path: Path
) -> Iterator[Target]:
    flags: list[str | Path] = [f"m={echo_model}", "--max-connections", str(MOST_CONNECTIONS)]
    wrap: Wrap | None = None
    tls: Tls | bool = False
    if request.param != "plain":
        issued = Issued.in_folder(tmp_path)
        context = ssl.create_default_context(cafile=issued.ca)
        mutual = request.param == "mtls"
        if mutual:
            context.load_cert_chain(*issued.client)
        flags += issued.flags if mutual else issued.flags[:4]
        wrap = secured(context)
        tls = Tls(issued.ca, *issued.client) if mutual else Tls(issued.ca)
    with running(*flags, transport=transport) as server:
        yield Target(server, wrap, tls)


def test_connections_reset_at_every_step(target: Target) -> None:
    assert target.is_good()
    files = until(target.files, lambda now: now == target.files())
    leaver = Leaver(target.server.address, LARGE, target.wrap)
    for step in STEPS:
        left = 0
        while left < RESETS:
            try:
                leaver.leave(step)
            except RefusedError:
                # The server has yet to learn that the last ones have left.
                continue
            left += 1
        assert until(target.files, lambda now: now <= files) <= files, step
        assert target.is_good(), step
    assert until(lambda: _holds_all_connections(leaver))
    assert until(target.is_good)


def _holds_all_connections(leaver: Leaver) -> bool:
    """Whether as many connections as the server allows are served at once: none of those that left still counts."""
    held = []
    try:
        for _ in range(MOST_CONNECTIONS):
            held.append(leaver.open())
    except RefusedError:
        return False
    finally:
        for each in held:
            each.close()
    return True
