"""Server reflection (grpc.reflection.v1 and v1alpha): descriptors for clients without .proto files, like grpcurl."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool

from tensorferry.protos.standard import reflection_pb2 as pb
from tensorferry.protos.standard import reflection_v1alpha_pb2  # noqa: F401 (adds its file to the pool)
from tensorferry.server.names import REFLECTION_SERVICES
from tensorferry.server.status import status_of
from tensorferry.server.wire.receiving import receive

# Each call keeps a thread of the pool that all methods share.
_MAX_CALLS = 64

_Request = pb.ServerReflectionRequest
_Response = pb.ServerReflectionResponse


class ReflectionService:
    """Answers from the names of services and one descriptor pool. Thread-safe.

    A call keeps its thread until the client ends it.
    """

    def __init__(self, services: Iterable[str], pool: DescriptorPool) -> None:
        self._services = sorted(services)
        self._pool = pool
        self._free_calls = threading.BoundedSemaphore(_MAX_CALLS)
        self._handlers: dict[str, Callable[[_Request], _Response]] = {
            "file_by_filename": self._file_by_filename,
            "file_containing_symbol": self._file_containing_symbol,
            "file_containing_extension": self._file_containing_extension,
            "all_extension_numbers_of_type": self._all_extension_numbers_of_type,
            "list_services": self._list_services,
        }

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Return the handlers of both versions, for a grpc server."""
        # Both versions have the same messages on the wire.
        method: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self.server_reflection_info,
            response_serializer=_Response.SerializeToString,
        )
        return tuple(
            grpc.method_handlers_generic_handler(service, {"ServerReflectionInfo": method})
            for service in REFLECTION_SERVICES
        )

    def server_reflection_info(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[_Response]:
        """Yield one response for each request. For an unknown name it contains an error."""
        if not self._free_calls.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{_MAX_CALLS} reflection calls are open, which is the most this server keeps; end one, or try again",
            )
        try:
            for data in messages:
                try:
                    request = receive(data, _Request)
                except Exception as error:
                    status = status_of(error)
                    context.abort(status.code, status.message)
                yield self._answer(request)
        finally:
            self._free_calls.release()

    def _answer(self, request: _Request) -> _Response:
        query = request.WhichOneof("message_request")
        if query is None:
            expected = ", ".join(self._handlers)
            response = _error(
                grpc.StatusCode.INVALID_ARGUMENT, f"the request is empty; set one of {expected}"
            )
        else:
            try:
                response = self._handlers[query](request)
            except KeyError:
                response = _error(
                    grpc.StatusCode.NOT_FOUND, f"{query}: not found in this server's descriptors"
                )
        response.original_request.CopyFrom(request)
        return response

    def _file_by_filename(self, request: _Request) -> _Response:
        return _files(self._pool.FindFileByName(request.file_by_filename))

    def _file_containing_symbol(self, request: _Request) -> _Response:
        symbol = request.file_containing_symbol
        try:
            return _files(self._pool.FindFileContainingSymbol(symbol))
        except KeyError:
            # Protobuf does not find methods by it.
            return _files(self._pool.FindMethodByName(symbol).containing_service.file)

    def _file_containing_extension(self, request: _Request) -> _Response:
        query = request.file_containing_extension
        extended = self._pool.FindMessageTypeByName(query.containing_type)
        extension = self._pool.FindExtensionByNumber(extended, query.extension_number)
        return _files(self._pool.FindFileContainingSymbol(extension.full_name))

    def _all_extension_numbers_of_type(self, request: _Request) -> _Response:
        extended = self._pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
        numbers = sorted(extension.number for extension in self._pool.FindAllExtensions(extended))
        return _Response(
            all_extension_numbers_response=pb.ExtensionNumberResponse(
                base_type_name=extended.full_name, extension_number=numbers
            )
        )

    def _list_services(self, request: _Request) -> _Response:
        named = [pb.ServiceResponse(name=name) for name in self._services]
        return _Response(list_services_response=pb.ListServiceResponse(service=named))


def _files(file: Any) -> _Response:
    """Return the file and everything that it imports."""
    files = {file.name: file.serialized_pb}
    pending = [file]
    while pending:
        for imported in pending.pop().dependencies:
            if imported.name not in files:
                files[imported.name] = imported.serialized_pb
                pending.append(imported)
    return _Response(file_descriptor_response=pb.FileDescriptorResponse(file_descriptor_proto=files.values()))


def _error(code: grpc.StatusCode, message: str) -> _Response:
    return _Response(error_response=pb.ErrorResponse(error_code=code.value[0], error_message=message))
