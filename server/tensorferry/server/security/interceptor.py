"""Interceptor that checks the client's role for every method that grpcio serves.

It excludes the two inference methods: both transports authorize those themselves and pass the identity on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from tensorferry.server.identity import CONTROL, CURRENT_CLIENT
from tensorferry.server.security.access_control import AccessControl, ClientCertificate
from tensorferry.server.security.method_roles import HEALTH, SELF_AUTHORIZING, required_role
from tensorferry.server.status import status_of

_log = logging.getLogger("tensorferry.server")
# The inference methods authorize their calls themselves; load balancers and orchestrators have no token.
_EXEMPT = SELF_AUTHORIZING | HEALTH


def certificate_from_context(context: grpc.ServicerContext) -> ClientCertificate:
    """Return the certificate of the call's connection."""
    # Any, because the type stubs also allow numbers as values.
    properties: Mapping[str, Any] = context.auth_context()
    (pem,) = properties.get("x509_pem_cert", (b"",))
    return ClientCertificate(context.peer_identity_key(), tuple(context.peer_identities() or ()), pem)


class AccessInterceptor(grpc.ServerInterceptor):
    """Refusal of unauthorized calls. Health checks need no authorization. Thread-safe.

    A log line names the client of each call that needs the control role.
    """

    def __init__(self, access: AccessControl) -> None:
        self._access = access

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of a method. grpcio calls this for each call."""
        found = continuation(handler_call_details)
        method = handler_call_details.method
        if found is None or method in _EXEMPT:
            return found
        handler: Any = found
        make, behaviour = _KINDS[handler.request_streaming, handler.response_streaming]
        guarded: grpc.RpcMethodHandler[Any, Any] = make(
            self._guarded(method, getattr(handler, behaviour)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return guarded

    def _guarded(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        role = required_role(method)

        # `wraps` copies attributes, which grpcio reads.
        @functools.wraps(behaviour)
        def guarded(request: Any, context: grpc.ServicerContext, *more: Any) -> Any:
            try:
                client = self._access.admit(
                    role,
                    context.invocation_metadata(),
                    context.peer,
                    lambda: certificate_from_context(context),
                )
            except Exception as error:
                status = status_of(error)
                context.abort(status.code, status.message)
            if role == CONTROL:
                _log.info("%s is called by %s", method.rpartition("/")[2], client.name)
            token = CURRENT_CLIENT.set(client)
            try:
                return behaviour(request, context, *more)
            finally:
                CURRENT_CLIENT.reset(token)

        return guarded


_KINDS: dict[tuple[bool, bool], tuple[Callable[..., Any], str]] = {
    (False, False): (grpc.unary_unary_rpc_method_handler, "unary_unary"),
    (False, True): (grpc.unary_stream_rpc_method_handler, "unary_stream"),
    (True, False): (grpc.stream_unary_rpc_method_handler, "stream_unary"),
    (True, True): (grpc.stream_stream_rpc_method_handler, "stream_stream"),
}
