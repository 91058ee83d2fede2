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
    from tensorferry.batcher.execution.completion import ResponseBurstHook
    from tensorferry.batcher.execution.executor import BatchStartCallback, InstanceHealthCallback
    from tensorferry.batcher.execution.model_functions import (
        BatchAware,
        KeepsStates,
        ModelFunction,
        StagedModel,
    )
    from tensorferry.batcher.offline import batch_inference
    from tensorferry.batcher.padding import Padding, PadInput, PadPlan
    from tensorferry.batcher.pipeline.pipeline import Pipeline
    from tensorferry.batcher.pipeline.stage import Stage, StageModel
    from tensorferry.batcher.pipeline.tensors import stack_rows
    from tensorferry.batcher.request import (
        AloneKey,
        BatchInfo,
        CloseReason,
        HeldTensor,
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

# The names of each module, which is imported at the first use of one: a process that runs no batches needs neither these nor
# numpy.
_NAMES = {
    "answer_cache": ["AnswerCache", "CacheStatistics"],
    "batcher": ["Batcher"],
    "execution.completion": ["ResponseBurstHook"],
    "execution.executor": ["BatchStartCallback", "InstanceHealthCallback"],
    "execution.model_functions": ["BatchAware", "KeepsStates", "ModelFunction", "StagedModel"],
    "offline": ["batch_inference"],
    "padding": ["PadInput", "PadPlan", "Padding"],
    "pipeline.pipeline": ["Pipeline"],
    "pipeline.stage": ["Stage", "StageModel"],
    "pipeline.tensors": ["stack_rows"],
    "request": [
        "AloneKey",
        "BatchInfo",
        "CloseReason",
        "HeldTensor",
        "Outcome",
        "Request",
        "SequenceTag",
        "StageOutcome",
        "Tensor",
    ],
    "sequences.sequence": [
        "Control",
        "ControlTensor",
        "EndReason",
        "SequenceLimits",
        "SequenceStatistics",
        "StateTensor",
    ],
    "sequences.stateful_batcher": ["StatefulBatcher"],
    "statistics.counters": ["BatcherStatistics"],
    "statistics.histogram": ["BOUNDS", "Histogram", "interval_of"],
    "statistics.recent_batches": ["BatchMember", "BatchRecord"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


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
    "HeldTensor",
    "Histogram",
    "InstanceFailed",
    "InstanceHealthCallback",
    "InvalidRequest",
    "KeepsStates",
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
