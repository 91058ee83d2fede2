"""Collects requests over a short time or until a batch is full, and runs them together.

A library of its own: it needs numpy alone, and knows neither transport nor engine.
"""

from tensorferry.batcher.batcher import Batcher
from tensorferry.batcher.clients import ClientPolicy
from tensorferry.batcher.completions import Together
from tensorferry.batcher.distribution import BOUNDS, Distribution, interval_of
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
from tensorferry.batcher.offline import batch_inference
from tensorferry.batcher.options import BatcherSettings
from tensorferry.batcher.padding import Padding, PadInput, PadPlan
from tensorferry.batcher.policy import CloseReason
from tensorferry.batcher.record import BatchRecord, Rider
from tensorferry.batcher.request import BatchInfo, Outcome, Request, Tensor
from tensorferry.batcher.staged import StagedModel
from tensorferry.batcher.statistics import BatcherStatistics
from tensorferry.batcher.timeouts import QueuePolicy

__all__ = [
    "BOUNDS",
    "BatchInfo",
    "BatchRecord",
    "Batcher",
    "BatcherClosed",
    "BatcherError",
    "BatcherSettings",
    "BatcherStatistics",
    "Cancelled",
    "ClientPolicy",
    "CloseReason",
    "DeadlineExceeded",
    "Distribution",
    "InstanceFailed",
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
    "Rider",
    "RunTimedOut",
    "Shed",
    "StagedModel",
    "Tensor",
    "Together",
    "batch_inference",
    "interval_of",
]
