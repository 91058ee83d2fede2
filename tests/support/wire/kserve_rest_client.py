"""KServe's client of HTTP against a server, with a JSON report; test_kserve.py runs it in KServe's environment.

The argument is the server's URL. stdin has the values of a tensor for each datatype.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig, httpx
from kserve.protocol.infer_type import RequestedOutput
from kserve.utils.numpy_codec import to_np_dtype

CONCURRENT = 50


class Client:
    """The client, connected."""

    def __init__(self, client: InferenceRESTClient, url: str) -> None:
        self._client, self.url = client, url

    async def echo(self, datatype: str, values: Any, binary_in: bool, binary_out: bool | None) -> Any:
        """Return the shape and the values of the answer; no output is named if its form is None."""
        array = np.array(values, to_np_dtype(datatype))
        array = array.reshape(2, -1) if array.size else array.reshape(0, 3)
        given = InferInput("x", list(array.shape), datatype)
        given.set_data_from_numpy(array, binary_data=binary_in)
        outputs = None if binary_out is None else [RequestedOutput("y", {"binary_data": binary_out})]
        answer = await self.infer(f"echo-{datatype}", InferRequest("", [given], request_outputs=outputs))
        (output,) = answer.outputs
        return [output.shape, output.as_numpy().reshape(-1).tolist()]

    async def infer(self, model: str, request: InferRequest | dict[str, Any]) -> Any:
        return await self._client.infer(self.url, request, model_name=model)

    async def failure(self, model: str, request: dict[str, Any]) -> Any:
        """Return the status and the text of an error."""
        try:
            await self.infer(model, request)
        except httpx.HTTPStatusError as error:
            return [error.response.status_code, str(error)]
        return [200, ""]


def one(tag: float, **more: Any) -> InferRequest:
    """Return a request with the model's only input."""
    given = InferInput("x", [1, 1], "FP32")
    given.set_data_from_numpy(np.array([[tag]], np.float32))
    return InferRequest("", [given], **more)


async def report(url: str, tensors: dict[str, list[Any]]) -> dict[str, Any]:
    """Return everything that the tests check."""
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as inner:
        client, forms = Client(inner, url), [(i, o) for i in (True, False) for o in (None, True, False)]
        explained = await client.infer("echo-FP32", one(1, request_id="seven", parameters={"explain": True}))
        answers = await asyncio.gather(*(client.infer("echo-FP32", one(tag)) for tag in range(CONCURRENT)))
        return {
            "live": await inner.is_server_live(url),
            "ready": await inner.is_server_ready(url),
            "model_ready": [await inner.is_model_ready(url, name) for name in ("echo-FP32", "nobody")],
            "echoes": {
                f"{name} {binary_in} {binary_out}": await client.echo(name, values, binary_in, binary_out)
                for name, values in tensors.items()
                for binary_in, binary_out in forms
                # Which the client refuses to send.
                if binary_in or name != "FP16"
            },
            "empty": [await client.echo("FP32", [], *form) for form in forms],
            "explained": [explained.id, explained.model_name, explained.parameters["batch_rows"]],
            "concurrent": [answer.outputs[0].as_numpy().item() for answer in answers],
            "errors": [
                await client.failure("nobody", {"inputs": []}),
                await client.failure("echo-FP32", {"inputs": []}),
            ],
        }


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # The client logs each error that it raises.
    print(json.dumps(asyncio.run(report(sys.argv[1], json.load(sys.stdin)))))
