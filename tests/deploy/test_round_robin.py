"""grpcio's round_robin with health checking in front of two servers: stopping them in turn fails no
call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from deploy.traffic import Traffic
from support.processes.server import ServerProcess

from tensorferry.protos import SERVICE_NAME, inference_pb2_grpc
from tensorferry.protos import inference_pb2 as pb

# Longer than the health service takes to notify a client, on a busy machine.
DELAY = ("--drain-delay-seconds", "6")

# Calls are never retried, so a refused call fails.
WITHOUT_RETRIES = (
    ("grpc.enable_retries", 0),
    (
        "grpc.service_config",
        json.dumps(
            {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": SERVICE_NAME}}
        ),
    ),
    # Like the bundled client, which finds a restarted server soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


@pytest.fixture
def servers(transport: str, probe_model: Path) -> Iterator[list[ServerProcess]]:
    """Two servers; those that run at the end must stop with code 0 and without an error in their logs."""
    started = [ServerProcess.start(probe_model, *DELAY, transport=transport) for _ in range(2)]
    yield started
    for server in started:
        # All at once, because each waits for the drain delay.
        server.signal()
    for server in started:
        assert server.wait() == 0
        assert not server.errors()


def port_of(server: ServerProcess) -> int:
    return int(server.address.rpartition(":")[2])


def balanced(servers: Sequence[ServerProcess]) -> grpc.Channel:
    addresses = ",".join(server.address for server in servers)
    return grpc.insecure_channel(f"ipv4:{addresses}", options=WITHOUT_RETRIES)


def executed(server: ServerProcess) -> int:
    """Return how many batches the server has run."""
    with grpc.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        return int(
            stub.ModelStatistics(pb.ModelStatisticsRequest(), timeout=30).model_stats[0].execution_count
        )


def await_share(traffic: Traffic, server: ServerProcess) -> None:
    """Wait until the server gets its share of the traffic."""
    before = executed(server)
    while executed(server) < before + 20:
        traffic.await_more(10)
        assert not traffic.failures


def test_a_rolling_restart_fails_no_call(
    servers: list[ServerProcess], probe_model: Path, transport: str
) -> None:
    with balanced(servers) as channel, Traffic(channel) as traffic:
        for index, old in enumerate(servers):
            for server in servers:
                await_share(traffic, server)
            assert old.stop() == 0
            assert not old.errors()
            traffic.await_more()
            servers[index] = ServerProcess.start(probe_model, *DELAY, transport=transport, port=port_of(old))
        for server in servers:
            await_share(traffic, server)
    assert not traffic.failures
    # The open stream is on one server at a time.
    assert 1 <= traffic.left <= 2
