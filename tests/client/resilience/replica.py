"""A server process that ends by SIGABRT, as a native crash does, when it runs one of the methods named.

`python replica.py [METHOD...]` prints its port.
"""

from __future__ import annotations

import os
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc


class Replica(inference_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, ending: frozenset[str]) -> None:
        self._ending = ending

    def _run(self, method: str) -> None:
        if method in self._ending:
            os.abort()

    def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        self._run("ModelInfer")
        answer = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        answer.outputs.add(name="y", datatype="FP32", shape=[0])
        return answer

    def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        self._run("ModelMetadata")
        return pb.ModelMetadataResponse(name=request.name)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    servicer = Replica(frozenset(sys.argv[1:]))
    inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
