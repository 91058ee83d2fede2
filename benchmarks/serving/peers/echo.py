"""Bare grpcio server without a model, threaded or asyncio: the usual ceiling.

    python -m serving.peers.echo threaded|asyncio [threads]

It parses each request and builds each response, as any server must. An Identity gets its input
back; other models get zeros of the output's size.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from serving.peers import settings
from tensorferry.protos import inference_pb2 as pb
from tensorferry.protos import inference_pb2_grpc

OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
_OUTPUT_WIDTHS = {"tiny": 4, "mlp": 1000, "transformer": 384}
_ZEROS = bytes(4 * _OUTPUT_WIDTHS.get(settings.MODEL_NAME, 0))


def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    """Return the response of a server with this model."""
    raw = _ZEROS or request.raw_input_contents[0]
    response = pb.ModelInferResponse(model_name=request.model_name, id=request.id, raw_output_contents=[raw])
    response.outputs.add(name="y", datatype="FP32", shape=[1, len(raw) // 4])
    return response


class Threaded(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Servicer with a thread for each call in progress."""

    def ModelInfer(self, request: Any, context: Any) -> Any:
        """Answer one request."""
        return answer(request)

    def ModelStreamInfer(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:
        """Answer each request of a stream."""
        for request in request_iterator:
            yield pb.ModelStreamInferResponse(infer_response=answer(request))


class Asyncio(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Servicer on one event loop."""

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        """Answer one request."""
        return answer(request)

    async def ModelStreamInfer(self, request_iterator: AsyncIterator[Any], context: Any) -> Any:
        """Answer each request of a stream."""
        async for request in request_iterator:
            yield pb.ModelStreamInferResponse(infer_response=answer(request))


def serve_threaded(threads: int) -> None:
    """Serve until the process ends."""
    server = grpc.server(ThreadPoolExecutor(threads), options=OPTIONS)
    inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Threaded(), server)
    server.add_insecure_port(f"{settings.HOST}:{settings.PORT}")
    server.start()
    server.wait_for_termination()


async def serve_asyncio() -> None:
    """Serve until the process ends."""
    server = grpc.aio.server(options=OPTIONS)
    inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Asyncio(), server)
    server.add_insecure_port(f"{settings.HOST}:{settings.PORT}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    if sys.argv[1] == "asyncio":
        asyncio.run(serve_asyncio())
    else:
        serve_threaded(int(sys.argv[2]))
