"""KServe's client against a server, with a JSON report; test_kserve.py runs it in KServe's
environment.

The arguments are the server's address and its process id. stdin has the values of a tensor for each
datatype.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from kserve.protocol.infer_type import RequestedOutput
from kserve.utils.numpy_codec import to_np_dtype

CONCURRENT = 50


def probe(tag: int, *, index: int = 0, work: int = 0, **request: Any) -> InferRequest:
    """Return a request to the probe model: y = 2 tag + index, after `work`."""
    inputs = [
        InferInput("x", [1, 4], "FP32", np.full((1, 4), tag, np.float32)),
        InferInput("index", [1], "INT64", np.array([index])),
        InferInput("work", [1], "INT64", np.array([work])),
    ]
    return InferRequest(**{"model_name": "probe", "infer_inputs": inputs, **request})


def texts(array: np.ndarray[Any, Any]) -> list[Any]:
    """Return the elements as JSON has them; of strings, the texts."""
    return [value.decode() if isinstance(value, bytes) else value for value in array.reshape(-1).tolist()]


async def echo(client: InferenceGRPCClient, datatype: str, values: list[Any], *, raw: bool) -> list[Any]:
    """Return the values from the server's answer, sent as a numpy array or as a list."""
    shape = [2, len(values) // 2]
    array = np.array(values, to_np_dtype(datatype)).reshape(shape)
    given = InferInput("x", shape, datatype, array if raw else values)
    response = await client.infer(InferRequest(f"echo-{datatype}", [given]))
    (output,) = response.outputs
    assert output.shape == shape
    return texts(output.as_numpy())


async def failure(call: Any) -> dict[str, Any]:
    """Return how a call failed."""
    try:
        await call
    except grpc.RpcError as error:
        return {"code": error.code().name, "message": error.details()}
    except asyncio.CancelledError:
        return {"code": "CANCELLED", "message": ""}
    return {"code": "OK", "message": ""}


def _state(task: Path) -> str:
    """Return the state of a thread, from proc(5): the field after its name, which is in parentheses."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def standing_still(pids: list[int]) -> Iterator[None]:
    """Stop the server's processes, as a debugger does, and continue them at the end."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        # The signal takes effect later; a call in between would be answered.
        while any(_state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
            os.sched_yield()
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def late(client: InferenceGRPCClient, pids: list[int]) -> dict[str, Any]:
    """Return the error of a call that is not answered in time."""
    with standing_still(pids):
        return await failure(client.infer(probe(1), timeout=0.1))


async def cancelled(client: InferenceGRPCClient, pids: list[int]) -> dict[str, Any]:
    """Return the error of a call whose task is cancelled before it is answered."""
    with standing_still(pids):
        call = asyncio.create_task(client.infer(probe(1)))
        asyncio.get_running_loop().call_later(0.05, call.cancel)
        return await failure(call)


async def stubs(address: str) -> dict[str, Any]:
    """Return metadata with the stubs that the client brings, because it has no method for it."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        server = await stub.ServerMetadata(pb.ServerMetadataRequest())
        model = await stub.ModelMetadata(pb.ModelMetadataRequest(name="probe"))
    return {
        "server": server.name,
        "platform": model.platform,
        "inputs": [[tensor.name, tensor.datatype, list(tensor.shape)] for tensor in model.inputs],
    }


async def report(address: str, pids: list[int], tensors: dict[str, list[Any]]) -> dict[str, Any]:
    """Return everything that the tests check."""
    async with InferenceGRPCClient(address) as client:
        misshapen = probe(1)
        misshapen.inputs[0] = InferInput("x", [4], "FP32", [1.0] * 4)
        several = await client.infer(
            probe(3, request_id="three", request_outputs=[RequestedOutput("y")], parameters={"explain": True})
        )
        answers = await asyncio.gather(*(client.infer(probe(tag)) for tag in range(CONCURRENT)))
        return {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready(),
            "model_ready": [await client.is_model_ready(name) for name in ("probe", "nobody")],
            "raw": {name: await echo(client, name, values, raw=True) for name, values in tensors.items()},
            "typed": {
                name: await echo(client, name, values, raw=False)
                for name, values in tensors.items()
                if name != "FP16"
            },
            "id": several.id,
            "version": several.model_version,
            "batch_rows": several.parameters["batch_rows"].int64_param,
            "concurrent": [answer.outputs[0].as_numpy().reshape(-1)[0].item() for answer in answers],
            "errors": {
                # Two forms in one request, which this client can send.
                "mixed": await failure(client.infer(misshapen)),
                "nobody": await failure(client.infer(probe(1, model_name="nobody"))),
                "version": await failure(client.infer(probe(1, model_version="7"))),
                "raised": await failure(client.infer(probe(1, index=99))),
                "deadline": await late(client, pids),
                "cancelled": await cancelled(client, pids),
            },
            "after": (await client.infer(probe(8))).outputs[0].as_numpy().reshape(-1)[0].item(),
            **await stubs(address),
        }


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # The client logs each error that it raises.
    print(
        json.dumps(
            asyncio.run(report(sys.argv[1], [*map(int, sys.argv[2].split(","))], json.load(sys.stdin)))
        )
    )
