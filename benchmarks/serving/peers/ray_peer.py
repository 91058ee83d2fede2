"""Ray Serve: HTTP/1.1, raw bytes, `@serve.batch`."""

from __future__ import annotations

import os
import signal
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from starlette.requests import Request
from starlette.responses import Response

from serving.peers.settings import FOLDER, HOST, MAX_BATCH_SIZE, PORT, WINDOW_MS, Engine

LOGGING = {"enable_access_log": False}


@serve.deployment(
    max_ongoing_requests=1000, num_replicas=1, ray_actor_options={"num_cpus": 0}, logging_config=LOGGING
)
class Model:
    """Model that answers batches."""

    def __init__(self) -> None:
        self.engine = Engine()

    @serve.batch(max_batch_size=MAX_BATCH_SIZE, batch_wait_timeout_s=WINDOW_MS / 1000)
    async def infer(self, rows: list[bytes]) -> list[bytes]:
        """Return the bytes of each row."""
        return self.engine.run_bytes(rows)

    async def __call__(self, request: Request) -> Response:
        """Answer one row."""
        return Response(await self.infer(await request.body()))


def stop(*_: Any) -> None:
    """Stop on SIGTERM."""
    serve.shutdown()
    ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 << 20,
        _temp_dir=str(FOLDER / "ray"),
        log_to_driver=False,
    )
    serve.start(http_options=HTTPOptions(host=HOST, port=PORT), logging_config=LOGGING)
    deployment: Any = Model
    serve.run(deployment.bind())
    signal.signal(signal.SIGTERM, stop)
    while True:
        signal.pause()
