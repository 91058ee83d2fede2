"""Calls of the asyncio client that are not inference."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

from tensorferry.client import errors
from tensorferry.client.aio import waits
from tensorferry.client.base import ClientBase
from tensorferry.client.connection.context import CallContext, Headers
from tensorferry.client.errors import DeadlineExceeded, Unavailable
from tensorferry.client.messages import arguments, rpcs
from tensorferry.client.messages.metadata import ModelMetadata, ModelStatus, ServerMetadata
from tensorferry.client.messages.results import Answer
from tensorferry.client.messages.rpcs import Config, File, LogSettings, Rpc, TraceSettings
from tensorferry.client.messages.statistics import ModelStatistics
from tensorferry.protos import inference_pb2 as pb

T = TypeVar("T")
AnswerT = TypeVar("AnswerT", bound=Answer[Any])

# Seconds between two calls of `wait_ready`, after a server that is not ready, or a proxy that does not reach it, has answered.
_PAUSE = 0.25


class ServerCalls(ClientBase):
    """Health, metadata, model control, statistics and settings."""

    # Set by `close`; ends every wait before a retry.
    _closing: waits.Closing

    @abstractmethod
    async def _call(self, method: str, request: object, context: CallContext) -> Any:
        """Return the answer to a unary call, which is retried as the policy allows."""

    async def _run(self, rpc: Rpc[T], context: CallContext) -> T:
        return rpc.decode(await self._call(rpc.method, rpc.message, context))

    async def metadata(
        self, model: str, version: str = "", *, timeout: float | None = None, metadata: Headers = ()
    ) -> ModelMetadata:
        """Return the model's inputs, outputs and versions, cached until the server refuses a request for it.

        >>> (await client.metadata("digits")).inputs
        (TensorMetadata(name='image', datatype='UINT8', shape=(-1, 8, 8), optional=False),)
        """
        arguments.model(model, version)
        context = self._settings.of_call(metadata).begin(timeout)
        return await self._known(model, version, context)

    async def server_metadata(
        self, *, timeout: float | None = None, metadata: Headers = ()
    ) -> ServerMetadata:
        """Return the server's name, version and extensions.

        >>> (await client.server_metadata()).name
        'tensorferry'
        """
        return await self._ask(rpcs.SERVER_METADATA, timeout, metadata)

    async def is_live(self, *, timeout: float | None = None, metadata: Headers = ()) -> bool:
        """Return whether the server answers; False if it cannot be reached in time.

        >>> await client.is_live()
        True
        """
        return await self._health(rpcs.SERVER_LIVE, timeout, metadata)

    async def is_ready(self, *, timeout: float | None = None, metadata: Headers = ()) -> bool:
        """Return whether the server is ready; False if it cannot be reached in time.

        >>> await client.is_ready(timeout=1.0)
        True
        """
        return await self._health(rpcs.SERVER_READY, timeout, metadata)

    async def is_model_ready(
        self, model: str, version: str = "", *, timeout: float | None = None, metadata: Headers = ()
    ) -> bool:
        """Return whether the model is ready; False if the server cannot be reached in time.

        >>> await client.is_model_ready("digits"), await client.is_model_ready("letters")
        (True, False)
        """
        return await self._health(rpcs.model_ready(model, version), timeout, metadata)

    async def wait_ready(self, timeout: float | None = None, *, metadata: Headers = ()) -> bool:
        """Wait until the server is ready; return whether it is in time.

        Use it for a server that is starting: the channel connects as soon as the server listens,
        and the wait goes on while it loads models, or while a proxy answers that it is
        unavailable. Of several targets, one must be ready.

        >>> await client.wait_ready(timeout=30)
        True
        """
        rpc = rpcs.SERVER_READY
        context = self._settings.of_call(metadata).begin(timeout)
        methods = [connection.stub.ServerReady for connection in self._endpoints]
        while True:
            try:
                options = self._call_options(context)
            except DeadlineExceeded:
                return False
            if await self._begin(waits.one_is_ready, methods, rpc.message, options):
                return True
            left = context.deadline.left()
            if await self._closing.wait(_PAUSE if left is None else min(left, _PAUSE)):
                raise errors.closed_during_call()

    async def models(
        self, *, ready: bool = False, timeout: float | None = None, metadata: Headers = ()
    ) -> tuple[ModelStatus, ...]:
        """Return the models of the server's repository, in any state; with `ready`, those that take requests.

        >>> [model.name for model in await client.models(ready=True)]
        ['digits']
        """
        return await self._ask(rpcs.repository_index(ready), timeout, metadata)

    async def load_model(
        self,
        model: str,
        *,
        config: Config | None = None,
        files: Mapping[str, File] | None = None,
        timeout: float | None = None,
        metadata: Headers = (),
    ) -> None:
        """Load a model of the server's repository, or load it again; return when it is ready.

        `config` replaces the model's configuration: a dict, or JSON. `files` replaces files of the
        model, as "VERSION/NAME": bytes, or the path of a local file. It needs a `config`.

        >>> await client.load_model("digits", config={"max_batch_size": 16})
        """
        await self._ask(rpcs.load_model(model, config, files), timeout, metadata)
        self._cache.forget(model)

    async def unload_model(
        self, model: str, *, dependents: bool = False, timeout: float | None = None, metadata: Headers = ()
    ) -> None:
        """Stop requests for a model; the server still answers those that it has accepted.

        With `dependents`, the models that an ensemble consists of are unloaded, too.

        >>> await client.unload_model("digits")
        >>> await client.is_model_ready("digits")
        False
        >>> await client.load_model("digits")
        """
        await self._ask(rpcs.unload_model(model, dependents), timeout, metadata)
        self._cache.forget(model)

    async def model_config(
        self, model: str, version: str = "", *, timeout: float | None = None, metadata: Headers = ()
    ) -> dict[str, Any]:
        """Return the configuration in use, with the fields of config.pbtxt as a dict.

        Repeated fields are lists, messages dicts, and enums their names.

        >>> (await client.model_config("digits"))["input"][0]["dims"]
        [8, 8]
        """
        return await self._ask(rpcs.model_config(model, version), timeout, metadata)

    async def statistics(
        self, model: str = "", version: str = "", *, timeout: float | None = None, metadata: Headers = ()
    ) -> tuple[ModelStatistics, ...]:
        """Return counts and times of a model's versions, by default of all models.

        >>> [statistics] = await client.statistics("digits")
        >>> statistics.success.count > 0
        True
        """
        return await self._ask(rpcs.statistics(model, version), timeout, metadata)

    async def trace_settings(
        self, model: str = "", *, timeout: float | None = None, metadata: Headers = ()
    ) -> TraceSettings:
        """Return what is traced of a model, by default of the server: values by name.

        >>> (await client.trace_settings())["trace_level"]
        ('OFF',)
        """
        return await self._ask(rpcs.trace_settings(model), timeout, metadata)

    async def update_trace_settings(
        self,
        settings: Mapping[str, object],
        model: str = "",
        *,
        timeout: float | None = None,
        metadata: Headers = (),
    ) -> TraceSettings:
        """Change what is traced of a model, by default of the server, and return all settings.

        Each value is a str, an int or a list of str. None sets back to the default. Triton's servers
        have such settings; this project's answer UNIMPLEMENTED to any other value than their own.

        >>> (await client.update_trace_settings({"trace_rate": 1}))["trace_rate"]
        ('1',)
        """
        return await self._ask(rpcs.trace_settings(model, settings), timeout, metadata)

    async def log_settings(self, *, timeout: float | None = None, metadata: Headers = ()) -> LogSettings:
        """Return what the server logs: values by name.

        >>> (await client.log_settings())["log_warning"]
        True
        """
        return await self._ask(rpcs.log_settings(), timeout, metadata)

    async def update_log_settings(
        self,
        settings: Mapping[str, bool | int | str],
        *,
        timeout: float | None = None,
        metadata: Headers = (),
    ) -> LogSettings:
        """Change what the server logs, and return all settings.

        >>> (await client.update_log_settings({"log_info": False}))["log_info"]
        False
        """
        return await self._ask(rpcs.log_settings(settings), timeout, metadata)

    async def _known(self, model: str, version: str, context: CallContext) -> ModelMetadata:
        return self._cache.get(model, version) or await self._fetch(model, version, context)

    async def _fetch(self, model: str, version: str, context: CallContext) -> ModelMetadata:
        known = await self._run(rpcs.model_metadata(model, version), context)
        self._store(model, version, known)
        return known

    async def _compared(
        self, request: pb.ModelInferRequest, context: CallContext, answer: AnswerT
    ) -> AnswerT:
        """Return the answer; raise Internal if it does not fit its request, or the metadata of its model."""
        if self._difference(request, answer) is not None:
            # The model may have been replaced since its metadata was fetched.
            await self._fetch(request.model_name, request.model_version, context)
            error = self._difference(request, answer)
            if error is not None:
                raise error
        return answer

    async def _ask(self, rpc: Rpc[T], timeout: float | None, metadata: Headers) -> T:
        return await self._run(rpc, self._settings.of_call(metadata).begin(timeout))

    async def _health(self, rpc: Rpc[bool], timeout: float | None, metadata: Headers) -> bool:
        try:
            return await self._ask(rpc, timeout, metadata)
        except (Unavailable, DeadlineExceeded):
            return False
