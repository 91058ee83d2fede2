from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from e2e.fixtures import TRANSPORTS
from support.processes.server import ServerProcess
from support.wire.http_inputs import Ask


@pytest.fixture(scope="module")
def transport() -> str:
    """One transport of gRPC, because HTTP does not use it."""
    return TRANSPORTS[-1]


@pytest.fixture(autouse=True)
def no_sockets_of_clients_are_left() -> Iterator[None]:
    """Free what clients leave open: aiohttp closes connections after its session, and gevent's pool at its end."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(params=["blocking", "asyncio"])
async def ask(request: pytest.FixtureRequest, server: ServerProcess) -> AsyncIterator[Ask]:
    """Call methods of tritonclient's client, by name, of each of its kinds."""
    address = server.ready["http"].removeprefix("http://")
    if request.param == "asyncio":
        async with triton_aio.InferenceServerClient(address) as client:
            yield lambda method, *arguments, **named: getattr(client, method)(*arguments, **named)
    else:
        with triton.InferenceServerClient(address) as blocking:

            async def call(method: str, *arguments: Any, **named: Any) -> Any:
                return getattr(blocking, method)(*arguments, **named)

            yield call
