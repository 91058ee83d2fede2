"""Calls without a message, as many as threads: which other calls they delay, and for how long."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from fuzz.attackers.raw import PREFIX, Connection, headers_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from polling import until
from support.processes.probe import WAIT_SECONDS, answer, output, request
from support.processes.server import SERVER_PROCESSES, ServerProcess

from tensorferry.protos import inference_pb2_grpc
from tensorferry.server.grpc_server import MAX_HANDLER_THREADS

# Number of calls that are not answered.
SOON = 0.5


@pytest.mark.parametrize("rpc", ["ModelInfer", "ServerMetadata"])
def test_health_is_answered_whatever_threads_others_take(plain: ServerProcess, rpc: str) -> None:
    server = plain
    # Calls of the lane have no thread.
    starves = server.ready["transport"] == "threaded" or rpc != "ModelInfer"
    with grpc.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        live: Any = channel.unary_unary(f"{PREFIX}ServerLive")
        health = health_pb2_grpc.HealthStub(channel)
        live(b"", timeout=WAIT_SECONDS)
        with Connection(server.address, WAIT_SECONDS) as silent:
            for _ in range(MAX_HANDLER_THREADS):
                silent.begin(headers_of(rpc))
            # They have been read.
            silent.ping()
            if starves and SERVER_PROCESSES:
                # They take the threads of one process, which may not be that of the channel.
                pass
            elif starves:
                # On a busy machine some of them may be yet to take their threads.
                until(
                    lambda: live.future(b"", timeout=SOON).code(),
                    lambda code: code is grpc.StatusCode.DEADLINE_EXCEEDED,
                )
            else:
                live(b"", timeout=WAIT_SECONDS)
            status = health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS).status
            assert status == health_pb2.HealthCheckResponse.SERVING
            watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
            if server.ready["transport"] == "lane":
                response = stub.ModelInfer(request(1), timeout=WAIT_SECONDS)
                assert output(response).tolist() == answer(1).tolist()
        # They end with their connection.
        live(b"", timeout=WAIT_SECONDS)
        response = stub.ModelInfer(request(2), timeout=WAIT_SECONDS)
        assert output(response).tolist() == answer(2).tolist()
