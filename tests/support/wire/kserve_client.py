"""KServe's client against a server, with a JSON report; test_kserve.py runs it in KServe's environment.

The argument is the server's address. stdin has the values of a tensor for each datatype.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest
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
    return {"code": "OK", "message": ""}


async def report(address: str, tensors: dict[str, list[Any]]) -> dict[str, Any]:
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
                "raised": await failure(client.infer(probe(1, index=99))),
            },
            "after": (await client.infer(probe(8))).outputs[0].as_numpy().reshape(-1)[0].item(),
        }


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # The client logs each error that it raises.
    print(json.dumps(asyncio.run(report(sys.argv[1], json.load(sys.stdin)))))
