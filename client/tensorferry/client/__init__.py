"""The client of tensorferry, and of every server of the Open Inference Protocol.

`InferenceClient` is for threads; `tensorferry.client.aio` has the same for asyncio.
"""

from tensorferry.client.connection.channel import Tls
from tensorferry.client.connection.device_arrays import DeviceArray, DeviceResult
from tensorferry.client.connection.retry import Retry
from tensorferry.client.errors import (
    Cancelled,
    ClientClosed,
    DeadlineExceeded,
    FailedPrecondition,
    InferenceError,
    Internal,
    InvalidArgument,
    InvalidInput,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from tensorferry.client.messages.codec import StreamRequest
from tensorferry.client.messages.metadata import ModelMetadata, ModelStatus, ServerMetadata, TensorMetadata
from tensorferry.client.messages.results import Classification, ClassScore, InferenceResult
from tensorferry.client.messages.statistics import BatchStatistics, ModelStatistics, Times
from tensorferry.client.threads.client import InferenceClient
from tensorferry.client.threads.future import InferenceFuture
from tensorferry.client.threads.shared_memory import SharedMemory

__all__ = [
    "BatchStatistics",
    "Cancelled",
    "ClassScore",
    "Classification",
    "ClientClosed",
    "DeadlineExceeded",
    "DeviceArray",
    "DeviceResult",
    "FailedPrecondition",
    "InferenceClient",
    "InferenceError",
    "InferenceFuture",
    "InferenceResult",
    "Internal",
    "InvalidArgument",
    "InvalidInput",
    "ModelMetadata",
    "ModelStatistics",
    "ModelStatus",
    "NotFound",
    "PermissionDenied",
    "ResourceExhausted",
    "Retry",
    "ServerMetadata",
    "SharedMemory",
    "StreamRequest",
    "TensorMetadata",
    "Times",
    "Tls",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
]
