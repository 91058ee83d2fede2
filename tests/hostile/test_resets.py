"""A connection that is reset at any step of a call leaves no file open and does not count for --max-connections."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from hostile.resetting_client import STEPS, ResettingClient, Wrap, plain
from polling import until
from support.processes.server import SERVER_PROCESSES, ServerProcess, running
from support.server.certificates import Issued
from support.server.rig import request

from tensorferry.client import InferenceClient, Tls, Unavailable
from tensorferry.server.transport.core_leaks import warning_of

needs_no_leaks = pytest.mark.skipif(
    warning_of(grpc.__version__, os.environ.get("GRPC_EXPERIMENTS", ""), 0.0) is not None,
    reason="this grpcio leaks the files of reset connections; the server logs a warning",
)

RESETS = 25
MOST_CONNECTIONS = 20
# Larger than the initial flow-control window of 64 KiB.
LARGE = request({"x": np.zeros((1, 60_000), np.float32)}, model="m").SerializeToString()


@dataclass(frozen=True)
class Target:
    """A server, and the TLS settings of its clients."""

    server: ServerProcess
    wrap: Wrap
    tls: Tls | bool

    def files(self) -> int:
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.server.processes())

    def is_good(self) -> bool:
        """Return whether a client is answered. The server may refuse it while it counts connections that are reset."""
        with InferenceClient(self.server.address, tls=self.tls) as client:
            try:
                return client.infer("m", {"x": np.ones((1, 3), np.float32)})["y"].shape == (1, 3)
            except Unavailable:
                return False

    def reset_after_every_step(self) -> None:
        """Reset connections, each at an attempt at which the server does not close it before.

        It may still count connections that are already reset, or end a connection at its age.
        """
        client = ResettingClient(self.server.address, LARGE, self.wrap)
        for step in STEPS * RESETS:
            until(partial(client.reset_after, step))

    def accepts_all_connections(self) -> bool:
        """Return whether the server accepts as many connections as one process may have, so that no reset one counts."""
        client = ResettingClient(self.server.address, LARGE, self.wrap)
        with ExitStack() as stack:
            for _ in range(MOST_CONNECTIONS):
                connection = client.connect("acknowledgement")
                if connection is None:
                    return False
                stack.enter_context(connection)
        return True


@pytest.fixture(params=["plain", "mtls"])
def target(
    request: pytest.FixtureRequest, transport: str, echo_model: Path, tmp_path: Path
) -> Iterator[Target]:
    # Each process has its part of the limit.
    most = MOST_CONNECTIONS * int(SERVER_PROCESSES or 1)
    flags: list[str | Path] = [f"m={echo_model}", "--max-connections", str(most)]
    wrap = plain
    tls: Tls | bool = False
    if request.param != "plain":
        issued = Issued.in_folder(tmp_path)
        context = ssl.create_default_context(cafile=issued.ca)
        context.load_cert_chain(*issued.client)
        context.set_alpn_protocols(["h2"])
        flags += issued.flags
        wrap = partial(context.wrap_socket, server_hostname="localhost")
        tls = Tls(issued.ca, *issued.client)
    with running(*flags, transport=transport) as server:
        yield Target(server, wrap, tls)


@needs_no_leaks
def test_connections_reset_at_every_step(target: Target) -> None:
    # Each of several processes has then opened what it keeps.
    assert all(target.is_good() for _ in range(1 + 20 * int(SERVER_PROCESSES or 0)))
    files = until(target.files, lambda now: now == target.files())
    target.reset_after_every_step()
    until(target.files, lambda now: now <= files)
    until(target.accepts_all_connections)
    until(target.is_good)


def test_with_the_legacy_listener_they_end_at_the_age_of_connections(
    transport: str, echo_model: Path
) -> None:
    flags = (f"m={echo_model}", "--max-connection-age-seconds", "2")
    variables = {"GRPC_EXPERIMENTS": "-event_engine_listener"}
    with running(*flags, transport=transport, variables=variables) as server:
        target = Target(server, plain, False)
        assert target.is_good()
        files = until(target.files, lambda now: now == target.files())
        target.reset_after_every_step()
        until(target.files, lambda now: now <= files)
        until(target.is_good)
        assert not [line for line in server.log if "GRPC_EXPERIMENTS" in line]
