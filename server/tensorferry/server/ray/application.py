"""A Ray Serve application: replicas with our batcher and session, behind Ray's own gRPC ingress.

`application` builds it, `add_to_ingress` tells Ray's proxies what they serve. docs/guides/operations.md has how it is started.
What a replica does with a request is what the server does: the same service, without the transports.

A request goes through the proxy as bytes, which are read in the replica alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from ray import serve
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from tensorferry.protos import inference_pb2 as pb
from tensorferry.server.app import App
from tensorferry.server.config.load import load_config
from tensorferry.server.config.option import Scope
from tensorferry.server.config.server_config import OPTIONS, ServerConfig
from tensorferry.server.errors import ConfigError
from tensorferry.server.inference.reply import InferenceCall, InferenceReply
from tensorferry.server.methods.model_config import ModelConfigMethods
from tensorferry.server.ray.deadline import deadline_of
from tensorferry.server.ray.stream import RayStream
from tensorferry.server.status import Status, status_of, trailing_metadata
from tensorferry.server.telemetry import logs
from tensorferry.server.wire.receiving import receive


class Answer:
    """Bytes of a message, as Ray wants a message to be."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802
        """The bytes."""
        return self._data


def configuration(options: Mapping[str, Any]) -> ServerConfig:
    """What `tensorferry serve` would make of these: `models`, a list, and options by their names as in its file."""
    given = dict(options)
    models = given.pop("models", [])
    flags: dict[str, str | None] = {}
    known = {option.flag: option for option in OPTIONS}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{name} is not an option; there are models, {', '.join(sorted(known))}")
        if known[name].scope is Scope.STANDALONE or (name == "model-control" and value != "none"):
            raise ConfigError(f"{name} is {value!r}; under Ray Serve it cannot be chosen: leave it out")
        values = value if isinstance(value, list) else [value]
        texts = [str(each).lower() if isinstance(each, bool) else str(each) for each in values]
        flags[name] = (known[name].separator or ",").join(texts)
    return load_config([str(model) for model in models], flags, {}, None)


class Completions:
    """Hands replies of any thread to futures of one event loop, which is woken once for many of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._done: deque[tuple[asyncio.Future[InferenceReply], InferenceReply]] = deque()
        # Guards _waking. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._waking = False

    def give(self, future: asyncio.Future[InferenceReply], reply: InferenceReply) -> None:
        """From any thread. After the loop is closed it does nothing: nobody waits any more."""
        self._done.append((future, reply))
        with self._lock:
            if self._waking:
                return
            self._waking = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            self._done.clear()

    def _deliver(self) -> None:
        with self._lock:
            self._waking = False
        while self._done:
            future, reply = self._done.popleft()
            if not future.done():
                future.set_result(reply)


class Replica:
    """One replica. Its methods are those of GRPCInferenceService, on the event loop that Ray has for it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        config = configuration(options)
        self._stopped = threading.Lock()
        logs.configure(config.log_format, config.log_level)
        self._app = App(config)
        self._app.load()
        self._service = self._app.service
        self._servicer = self._app.servicer
        self._completions: Completions | None = None

    async def ModelInfer(self, request: bytes, grpc_context: RayServegRPCContext) -> Answer:  # noqa: N802
        """One request, one response; many are under way at a time, and share their batches."""
        metadata = grpc_context.invocation_metadata()
        reply = await self.reply(request, deadline_of(metadata), metadata)
        try:
            return Answer(reply.message())
        except Exception as error:
            return self._refuse(self._service.status_of(error, reply), grpc_context)

    async def ModelStreamInfer(  # noqa: N802
        self, requests: gRPCInputStream[bytes], grpc_context: RayServegRPCContext
    ) -> AsyncIterator[Answer]:
        """Requests as they come, responses in their order or as they are done, as the call's metadata says."""
        metadata = grpc_context.invocation_metadata()
        stream = RayStream(
            self.reply,
            self._service.status_of,
            deadline_of(metadata),
            metadata,
            max_in_flight=self._app.config.max_in_flight_per_stream,
        )
        async for message in stream.responses(requests):
            yield Answer(message)
        if stream.end is not None:
            # Only with a message does Ray send the context over; the proxy drops it.
            yield self._refuse(stream.end, grpc_context)

    async def ServerLive(self, request: bytes, grpc_context: RayServegRPCContext) -> Answer:  # noqa: N802
        """Whether a replica answers."""
        return self._answer(self._servicer.server_live, pb.ServerLiveRequest, request, grpc_context)

    async def ServerReady(self, request: bytes, grpc_context: RayServegRPCContext) -> Answer:  # noqa: N802
        """Whether a replica is ready."""
        return self._answer(self._servicer.server_ready, pb.ServerReadyRequest, request, grpc_context)

    async def ModelReady(self, request: bytes, grpc_context: RayServegRPCContext) -> Answer:  # noqa: N802
        """Whether a replica has the model ready."""
        return self._answer(self._servicer.model_ready, pb.ModelReadyRequest, request, grpc_context)

    async def ServerMetadata(self, request: bytes, grpc_context: RayServegRPCContext) -> Answer:  # noqa: N802
        """Name, version, extensions."""
        return self._answer(self._servicer.server_metadata, pb.ServerMetadataRequest, request, grpc_context)

    async def ModelMetadata(self, request: bytes, grpc_context: RayServegRPCContext) -> Answer:  # noqa: N802
        """The model's signature."""
        return self._answer(self._servicer.model_metadata, pb.ModelMetadataRequest, request, grpc_context)

    async def ModelConfig(self, request: bytes, grpc_context: RayServegRPCContext) -> Answer:  # noqa: N802
        """The model's configuration."""
        methods = ModelConfigMethods(self._app.registry).methods()
        return self._answer(methods["ModelConfig"], pb.ModelConfigRequest, request, grpc_context)

    async def check_health(self) -> None:
        """What Ray asks now and then: a replica none of whose models works is replaced."""
        if not self._app.registry.serving:
            reasons = [
                f"{model.name}: {model.health.reason}"
                for model in self._app.registry.models()
                if model.health.reason is not None
            ]
            raise RuntimeError("; ".join(reasons) or "no model is ready")

    def __del__(self) -> None:
        # What Ray calls when no call is under way any more, or its patience is at an end.
        app = getattr(self, "_app", None)
        if app is not None and self._stopped.acquire(blocking=False):
            app.drain()
            app.stop()

    async def reply(self, request: bytes, deadline: float, metadata: Any) -> InferenceReply:
        """What becomes of a request; it is withdrawn where the caller is cancelled."""
        loop = asyncio.get_running_loop()
        completions = self._completions
        if completions is None:
            completions = self._completions = Completions(loop)
        future: asyncio.Future[InferenceReply] = loop.create_future()
        give = completions.give
        call: InferenceCall = self._service.submit(
            request, deadline, lambda reply: give(future, reply), metadata
        )
        try:
            return await future
        except asyncio.CancelledError:
            call.cancel()
            raise

    def _answer(
        self,
        method: Callable[[Any], Any],
        kind: Any,
        request: bytes,
        context: RayServegRPCContext,
    ) -> Answer:
        try:
            return Answer(method(receive(request, kind)).SerializeToString())
        except Exception as error:
            return self._refuse(status_of(error), context)

    def _refuse(self, status: Status, context: RayServegRPCContext) -> Answer:
        """Not raised: Ray would log it as a bug of ours, and send it over with its stack."""
        context.set_code(status.code)
        context.set_details(status.message)
        context.set_trailing_metadata(list(trailing_metadata(status)))
        return Answer(b"")


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """The application, of the options that `configuration` knows and of `deployment`, Ray's options of the deployment.

    ConfigError where one has a wrong value, before anything is started.
    """
    options = dict(arguments)
    deployment = dict(options.pop("deployment", {}))
    config = configuration(options)
    # As many as fill the batches twice are under way in a replica before Ray starts another.
    enough = 2 * max(1, config.max_batch_size)
    scaling = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": enough}
    if "num_replicas" not in deployment:
        deployment.setdefault("autoscaling_config", scaling)
    deployment.setdefault("max_ongoing_requests", 16 * enough)
    deployment.setdefault("graceful_shutdown_timeout_s", config.drain_seconds + 5.0)
    made: Any = serve.deployment(Replica, name="tensorferry", **deployment)
    return made.bind(options)
