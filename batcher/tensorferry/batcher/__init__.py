"""Dynamic batching: collects requests and runs them in batches.

It needs numpy only, and depends on neither a transport nor an inference engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tensorferry.batcher.errors import (
    BatcherClosed,
    BatcherError,
    BatchFailed,
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
    SequenceEnded,
    SequenceNotStarted,
    Shed,
)
from tensorferry.batcher.settings import BatcherSettings, ClientPolicy, QueuePolicy

if TYPE_CHECKING:
    from tensorferry.batcher.answer_cache import AnswerCache, CacheStatistics
    from tensorferry.batcher.batcher import Batcher
    from tensorferry.batcher.execution.batch_aware import BatchAware, ModelFunction
    from tensorferry.batcher.execution.completion import ResponseBurstHook
    from tensorferry.batcher.execution.context import BatchStartCallback, InstanceHealthCallback
    from tensorferry.batcher.execution.staged_model import StagedModel
    from tensorferry.batcher.offline import batch_inference
    from tensorferry.batcher.padding import Padding, PadInput, PadPlan
    from tensorferry.batcher.pipeline.pipeline import Pipeline
    from tensorferry.batcher.pipeline.stage import Stage, StageModel
    from tensorferry.batcher.pipeline.tensors import stack_rows
    from tensorferry.batcher.request import (
        AloneKey,
        BatchInfo,
        CloseReason,
        Outcome,
        Request,
        SequenceTag,
        StageOutcome,
        Tensor,
    )
    from tensorferry.batcher.sequences.sequence import (
        Control,
        ControlTensor,
        EndReason,
        SequenceLimits,
        SequenceStatistics,
        StateTensor,
    )
    from tensorferry.batcher.sequences.stateful_batcher import StatefulBatcher
    from tensorferry.batcher.statistics.counters import BatcherStatistics
    from tensorferry.batcher.statistics.histogram import BOUNDS, Histogram, interval_of
    from tensorferry.batcher.statistics.recent_batches import BatchMember, BatchRecord

# The modules of these names are imported at a name's first use: a process that runs no batches needs neither them nor numpy.
_MODULES = {
    "AnswerCache": "answer_cache",
    "CacheStatistics": "answer_cache",
    "Batcher": "batcher",
    "BatchAware": "execution.batch_aware",
    "ModelFunction": "execution.batch_aware",
    "ResponseBurstHook": "execution.completion",
    "BatchStartCallback": "execution.context",
    "InstanceHealthCallback": "execution.context",
    "StagedModel": "execution.staged_model",
    "batch_inference": "offline",
    "PadInput": "padding",
    "PadPlan": "padding",
    "Padding": "padding",
    "Pipeline": "pipeline.pipeline",
    "Stage": "pipeline.stage",
    "StageModel": "pipeline.stage",
    "stack_rows": "pipeline.tensors",
    "AloneKey": "request",
    "BatchInfo": "request",
    "CloseReason": "request",
    "Outcome": "request",
    "Request": "request",
    "SequenceTag": "request",
    "StageOutcome": "request",
    "Tensor": "request",
    "Control": "sequences.sequence",
    "ControlTensor": "sequences.sequence",
    "EndReason": "sequences.sequence",
    "SequenceLimits": "sequences.sequence",
    "SequenceStatistics": "sequences.sequence",
    "StateTensor": "sequences.sequence",
    "StatefulBatcher": "sequences.stateful_batcher",
    "BatcherStatistics": "statistics.counters",
    "BOUNDS": "statistics.histogram",
    "Histogram": "statistics.histogram",
    "interval_of": "statistics.histogram",
    "BatchMember": "statistics.recent_batches",
    "BatchRecord": "statistics.recent_batches",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


__all__ = [
    "BOUNDS",
    "AloneKey",
    "AnswerCache",
    "BatchAware",
    "BatchFailed",
    "BatchInfo",
    "BatchMember",
    "BatchRecord",
    "BatchStartCallback",
    "Batcher",
    "BatcherClosed",
    "BatcherError",
    "BatcherSettings",
    "BatcherStatistics",
    "CacheStatistics",
    "Cancelled",
    "ClientPolicy",
    "CloseReason",
    "Control",
    "ControlTensor",
    "DeadlineExceeded",
    "EndReason",
    "Histogram",
    "InstanceFailed",
    "InstanceHealthCallback",
    "InvalidRequest",
    "ModelFunction",
    "ModelOutputError",
    "ModelRowsError",
    "OutOfMemory",
    "Outcome",
    "PadInput",
    "PadPlan",
    "Padding",
    "Pipeline",
    "QueueFull",
    "QueuePolicy",
    "Request",
    "RequestTooLarge",
    "ResponseBurstHook",
    "RunTimedOut",
    "SequenceEnded",
    "SequenceLimits",
    "SequenceNotStarted",
    "SequenceStatistics",
    "SequenceTag",
    "Shed",
    "Stage",
    "StageModel",
    "StageOutcome",
    "StagedModel",
    "StateTensor",
    "StatefulBatcher",
    "Tensor",
    "batch_inference",
    "interval_of",
    "stack_rows",
]
