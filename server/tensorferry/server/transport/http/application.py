"""The protocol over HTTP, as what an HTTP server serves: inferences are admitted, submitted and answered here."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.identity import ClientIdentity
from tensorferry.server.inference.reply import InferenceReply, InlineRunner
from tensorferry.server.inference.service import InferenceService
from tensorferry.server.status import StatusCode
from tensorferry.server.system.threads import HandlerThreads
from tensorferry.server.transport.call_admission import CallAdmission, Refusal
from tensorferry.server.transport.http.answers import EVENTS, error_of, error_response, response, response_of
from tensorferry.server.transport.http.bodies import unpacked
from tensorferry.server.transport.http.connection import Connection, Exchange
from tensorferry.server.transport.http.cors import cross_origin
from tensorferry.server.transport.http.errors import HttpError
from tensorferry.server.transport.http.generate import GenerateForm, error_event, generate_request
from tensorferry.server.transport.http.heads import Router
from tensorferry.server.transport.http.infer_answers import AnswerTranslator
from tensorferry.server.transport.http.infer_requests import AnswerForm, RequestTranslator
from tensorferry.server.transport.http.json_values import HALF_A_PAIR
from tensorferry.server.transport.http.method_calls import MethodCalls
from tensorferry.server.transport.http.routes import INFER, Target, routed
from tensorferry.server.transport.http.text.requests import TextForm, TextRequests
from tensorferry.server.transport.inline_schedule import InlineSchedule
from tensorferry.server.transport.threaded_servicer import Extension
from tensorferry.server.transport.transport_state import TransportState

# JSON of more bytes is read and written on other threads, because it takes milliseconds: a float takes about 100 ns.
_LONG_JSON_BYTES = 64 << 10
_LONG_ANSWER_BYTES = 16 << 10
# More than one, so that one long body does not delay all others.
_JSON_THREADS = 2


class _Event(NamedTuple):
    """An event that is written before the last reply."""

    data: bytes


WholeForm: TypeAlias = AnswerForm | TextForm | GenerateForm
Form: TypeAlias = WholeForm | _Event


class InferenceApplication:
    """Serves inferences, and the methods of `extensions`, on the loop's thread. See `Application`.

    Methods without another note are for the loop's thread. `shared` is that of all transports; `on_loop` calls a function on
    the loop's thread.
    """

    def __init__(
        self,
        service: InferenceService,
        extensions: Sequence[Extension],
        shared: TransportState,
        listening: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        self._service = service
        # Whether a web page can call this server by a name of its own that resolves to this machine.
        local = ipaddress.ip_address(listening.getsockname()[0]).is_loopback
        local = local and shared.tls is None and not shared.requires_credentials
        route: Router = partial(routed, local=local)
        self.route = cross_origin(route, shared.cors_origins) if shared.cors_origins else route
        self._methods = methods = MethodCalls(service, extensions, shared.access, on_loop)
        self.refusal, self.max_body_bytes = methods.refusal, methods.max_body_bytes
        self._calls = shared.calls
        self._admission: CallAdmission[Connection] = CallAdmission(
            service,
            shared,
            peer_of=lambda connection: connection.peer,
            certificate_of=lambda connection: connection.certificate,
        )
        self._requests = RequestTranslator(methods.metadata)
        self._texts = TextRequests(methods.known_models, methods.metadata)
        self._answers = AnswerTranslator()
        self._loop, self._on_loop = loop, on_loop
        self._threads = HandlerThreads(_JSON_THREADS, "http-json")
        # Replies to answer, and whether `_answer_all` will be called for them.
        self._replies: deque[tuple[Exchange, Form, InferenceReply]] = deque()
        self._answers_soon = False
        self._inline = InlineSchedule()
        self._runs_soon = False
        self._timer: asyncio.TimerHandle | None = None

    def serve(self, exchange: Exchange, body: bytes) -> None:
        """Answer a request, at once or later."""
        head = exchange.head
        target = head.target
        try:
            if isinstance(target, HttpError):
                # Not raised, because it would keep a traceback of each request.
                exchange.respond(error_response(target, head.errors))
                return
            if target.route.rpc != INFER:
                self._methods.serve(exchange, target, body)
                return
            caller, deadline = self._admission.admit_unary(exchange.connection, head.fields, head.timeout)
            if isinstance(caller, Refusal):
                exchange.respond(error_response(error_of(caller.status), head.errors))
                return
            json_bytes = head.json_length
            if json_bytes is None or target.route.form is not None:
                # Only a body with tensors can have bytes after its JSON.
                json_bytes = len(body)
            if head.encoding != "identity" or json_bytes > _LONG_JSON_BYTES:
                self._threads.submit(self._submit, exchange, target, body, deadline, caller, None)
            else:
                self._submit(exchange, target, body, deadline, caller, self._run_soon)
        except Exception as error:
            exchange.respond(response_of(error, self._service, head.errors))

    def _submit(
        self,
        exchange: Exchange,
        target: Target,
        body: bytes,
        deadline: float,
        caller: ClientIdentity,
        run_soon: Callable[[InlineRunner], None] | None,
    ) -> None:
        """Submit an admitted request. Without `run_soon`, on any thread."""
        head = exchange.head
        try:
            if head.encoding != "identity":
                body = unpacked(body, head.encoding, self.max_body_bytes(head))
            try:
                message, form = self._message(target, body, head.json_length)
            except UnicodeEncodeError:
                raise HttpError(400, HALF_A_PAIR) from None
        except Exception as error:
            if isinstance(error, HttpError):
                self._service.count_refused(StatusCode.INVALID_ARGUMENT)
            self._on_loop(partial(exchange.respond, response_of(error, self._service, head.errors)))
            self._calls.end_unary()
            return
        completed = partial(self._completed, exchange, form)
        answers = None
        if isinstance(form, GenerateForm) and form.events:
            answers = partial(self._take_answer, exchange, form)
        call = self._service.submit(
            message, deadline, completed, head.fields, caller, answers=answers, run_soon=run_soon
        )
        exchange.submitted(call)

    def _message(self, target: Target, body: bytes, json_length: int | None) -> tuple[bytes, Form]:
        form, parts = target.route.form, target.parts
        if form is None:
            model = (parts["name"], parts["version"]) if parts else (self._only_model(), "")
            return self._requests.message(model, body, json_length)
        if isinstance(form, GenerateForm):
            return generate_request(self._methods.metadata, (parts["name"], parts["version"]), body), form
        return self._texts.message(form, body, parts.get("name", ""))

    def _only_model(self) -> str:
        names = [model.name for model in self._methods.known_models()]
        if len(names) != 1:
            raise HttpError(
                400,
                f"this path is for a server with one model, but {len(names)} are ready; use /v2/models/NAME/infer",
            )
        return names[0]

    def _take_answer(self, exchange: Exchange, form: GenerateForm, reply: InferenceReply) -> Exception | None:
        """Take an answer before the last reply; return why it cannot be sent. Called on the thread that runs the request."""
        try:
            event = form.event(reply.pieces())
        except HttpError as error:
            return InvalidRequestError(str(error))
        refusal = exchange.connection.count_unread(len(event))
        if refusal is None:
            # With the replies, because the last reply must be sent after it.
            self._completed(exchange, _Event(event), reply)
        return refusal

    def _completed(self, exchange: Exchange, form: Form, reply: InferenceReply) -> None:
        """Keep a reply for the end of its batch, or wake the loop for it. Called on any thread."""
        self._replies.append((exchange, form, reply))
        if not self._answers_soon:
            self._answers_soon = True
            self._on_loop(self._answer_all)

    def _answer_all(self) -> None:
        # Before the replies are taken, so that one that comes meanwhile wakes the loop again.
        self._answers_soon = False
        try:
            while self._replies:
                exchange, form, reply = self._replies.popleft()
                in_json = not (isinstance(form, AnswerForm) and form.all_binary)
                if isinstance(form, _Event):
                    exchange.send_event(form.data, reply.sent)
                elif in_json and reply.output_bytes > _LONG_ANSWER_BYTES:
                    self._threads.submit(self._build_on_thread, exchange, form, reply)
                else:
                    self._send(exchange, reply, self._built(exchange, form, reply))
        finally:
            if self._replies:
                # One raised, which must not delay the others.
                self._loop.call_soon(self._answer_all)

    def _build_on_thread(self, exchange: Exchange, form: WholeForm, reply: InferenceReply) -> None:
        self._on_loop(partial(self._send, exchange, reply, self._built(exchange, form, reply)))

    def _built(self, exchange: Exchange, form: WholeForm, reply: InferenceReply) -> bytes:
        """Return the response; after events what follows them."""
        try:
            if reply.silent:
                return b"" if exchange.has_events else response(200, b"", EVENTS)
            if isinstance(form, GenerateForm) and exchange.has_events:
                return form.event(reply.pieces())
            if isinstance(form, (TextForm, GenerateForm)):
                return form.response(reply.pieces())
            return self._answers.response(reply.pieces(), form, gzipped=exchange.head.accepts_gzip)
        except BaseException as error:
            # Every exception, because nothing else would answer the request.
            if exchange.has_events:
                return error_event(self._service.status_of(error, reply).message)
            return response_of(error, self._service, exchange.head.errors, reply)

    def _send(self, exchange: Exchange, reply: InferenceReply, data: bytes) -> None:
        exchange.respond(data)
        self._calls.end_unary()
        reply.sent()

    def _run_soon(self, batcher: InlineRunner) -> None:
        """Run the batcher's next batch once everything that was received is handled."""
        self._inline.run_soon(batcher)
        if not self._runs_soon:
            self._runs_soon = True
            # Twice, because what the loop finds meanwhile is handled between the two.
            self._loop.call_soon(self._loop.call_soon, self._run_due)

    def _run_due(self) -> None:
        self._runs_soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # The replies of the batches are answered below.
        self._answers_soon = True
        try:
            delay = self._inline.run_due()
        finally:
            self._answer_all()
        if delay < math.inf:
            self._timer = self._loop.call_later(delay, self._run_due)

    def close(self) -> None:
        """End the threads. Called on any thread, after the loop has ended."""
        self._threads.shutdown(wait=False)
        self._methods.close()
