"""Dynamic batching: collects requests and runs them in batches.

It needs numpy only, and depends on neither a transport nor an inference engine.
"""

from tensorferry.batcher.batcher import Batcher
from tensorferry.batcher.errors import (
    BatcherClosed,
    BatcherError,
    Cancelled,
    DeadlineExceeded,
    InstanceFailed,
    InvalidRequest,
    ModelOutputError,
    ModelRowsError,
    OutOfMemory,
    QueueFull,
    RequestTooLarge,
    RunTimedOut,
    Shed,
)
from tensorferry.batcher.execution.completion import ResponseBurstHook
from tensorferry.batcher.execution.context import BatchStartCallback, InstanceHealthCallback
from tensorferry.batcher.execution.staged_model import StagedModel
from tensorferry.batcher.offline import batch_inference
from tensorferry.batcher.padding import Padding, PadInput, PadPlan
from tensorferry.batcher.request import BatchInfo, CloseReason, Outcome, Request, Tensor
from tensorferry.batcher.settings import BatcherSettings, ClientPolicy, QueuePolicy
from tensorferry.batcher.statistics.counters import BatcherStatistics
from tensorferry.batcher.statistics.histogram import BOUNDS, Histogram, interval_of
from tensorferry.batcher.statistics.recent_batches import BatchMember, BatchRecord

__all__ = [
    "BOUNDS",
    "BatchInfo",
    "BatchMember",
    "BatchRecord",
    "BatchStartCallback",
    "Batcher",
    "BatcherClosed",
    "BatcherError",
    "BatcherSettings",
    "BatcherStatistics",
    "Cancelled",
    "ClientPolicy",
    "CloseReason",
    "DeadlineExceeded",
    "Histogram",
    "InstanceFailed",
    "InstanceHealthCallback",
    "InvalidRequest",
    "ModelOutputError",
    "ModelRowsError",
    "OutOfMemory",
    "Outcome",
    "PadInput",
    "PadPlan",
    "Padding",
    "QueueFull",
    "QueuePolicy",
    "Request",
    "RequestTooLarge",
    "ResponseBurstHook",
    "RunTimedOut",
    "Shed",
    "StagedModel",
    "Tensor",
    "batch_inference",
    "interval_of",
]
