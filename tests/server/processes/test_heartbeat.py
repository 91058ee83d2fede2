"""A server process's answers to the supervisor's pings: it calls itself."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from polling import PATIENCE

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc
from tensorferry.server.processes.heartbeat import Heartbeat


class Server(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers its calls with these codes, one after the other."""

    def __init__(self, *codes: grpc.StatusCode) -> None:
        self.codes = list(codes)

    def ServerLive(self, request: Any, context: Any) -> pb.ServerLiveResponse:
        if self.codes and (code := self.codes.pop(0)) is not grpc.StatusCode.OK:
            context.abort(code, "refused")
        return pb.ServerLiveResponse(live=True)


def test_each_answer_counts_also_a_refusal_but_not_unavailable(tmp_path: Path) -> None:
    socket = tmp_path / "self-0"
    socket.touch()
    alive: queue.SimpleQueue[None] = queue.SimpleQueue()
    heartbeat = Heartbeat(socket, lambda: alive.put(None))
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        codes = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK)
        inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Server(*codes), server)
        assert server.add_insecure_port(f"unix:{heartbeat.socket}")
        server.start()
        heartbeat.ask()
        for _ in range(2):
            heartbeat.ask()
            alive.get(timeout=PATIENCE)
        assert alive.empty()
        server.stop(None).wait()
