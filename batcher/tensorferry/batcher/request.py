"""Requests and batches: the records that all parts of the batcher share."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorferry.batcher.padding import PadPlan

Array = npt.NDArray[Any]


class HeldTensor:
    """One row of a state, [1, ...], in the memory of the model function that made it; see `KeepsStates`. Thread-safe."""

    __slots__ = ("dtype", "shape")

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def numpy(self) -> Array:
        """Return a copy in the host's memory. Each subclass has its own."""
        # Not an ABC: each batch asks of all its parts whether they are one, and `isinstance` of an ABC is slow.
        raise NotImplementedError


class Tensor(NamedTuple):
    """One input of a request: `shape` has the rows on axis 0, `data` the elements in row-major order.

    `data` is anything that `bytes.join` takes (bytes, memoryview, contiguous array), so that received bytes need not
    be copied before they are joined into a batch. For a dtype of objects it is a numpy object array of that shape. A state
    may be a HeldTensor.

    Its memory must not change or be used again while something refers to `data`: a batch may read that of a request that
    was cancelled. The batcher drops its reference once no batch can.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: Any


class AloneKey:
    """The key of a request that shares no batch. Neither do its parts in the stages of pipelines."""

    __slots__ = ()


class State(enum.Enum):
    """State of a request. DONE is terminal: `complete` was called, or is about to be."""

    NEW = "new"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


# For code that runs for each request: looking up a member of an enum is slow.
NEW, QUEUED, RUNNING, DONE = State

# Shared, because making new ones for each request takes time.
_NAN = math.nan
_NONE: frozenset[int] = frozenset()


class BatchInfo(NamedTuple):
    """The batch that a request was answered from. Times are in seconds.

    `number` counts batches from 1. `reason` says why the batch closed, `predicted` how long it was expected to take
    until it is answered (0 if unknown). A full batch had `full_rows` rows (0 if unknown). `input_time` went into joining,
    `compute_time` into the model, `output_time` is from the model's end until answers were given. `ended` is the model's
    end on the batcher's clock. `padded_length` is the length that rows were padded to, None if they were not. `step_ends`
    has the name and the end of each step that the model function ran, if it says so (see `BatchAware`).
    """

    number: int
    requests: int
    rows: int
    compute_time: float
    reason: CloseReason | None = None
    predicted: float = 0.0
    full_rows: int = 0
    padded_length: int | None = None
    input_time: float = 0.0
    output_time: float = 0.0
    ended: float = _NAN
    step_ends: Sequence[tuple[str, float]] = ()


# That of a request that is answered without a run.
NO_BATCH = BatchInfo(0, 0, 0, 0.0)


class StageOutcome(NamedTuple):
    """What became of a request in one stage of a pipeline.

    `arrival` is its arrival in the stage's batcher (NaN if it got there never), `queue_delay` and `batch` are as in
    `Outcome`. `batch` is None in the stage that failed. `stages` are those of the pipeline that runs the stage, if one does.
    """

    stage: str
    arrival: float
    queue_delay: float
    batch: BatchInfo | None
    stages: tuple[StageOutcome, ...] = ()


class Outcome(NamedTuple):
    """Result of a request: `outputs` or `error`, never both.

    `outputs` has the form that the model function returned, with the request's rows only; arrays in it are views of the
    batch's outputs. `batch` is None if the request never ran, or failed. `queue_delay` is in seconds, 0 if it was never
    in a batch. `position` is its place in the batch, from 0; `priority` its class, 1 the highest. `stages` has the stages
    of a pipeline that are done with the request, in that order; empty for a request of a plain batcher.
    """

    outputs: Any = None
    error: BaseException | None = None
    batch: BatchInfo | None = None
    queue_delay: float = 0.0
    position: int = 0
    priority: int = 1
    stages: tuple[StageOutcome, ...] = ()


class SequenceTag(NamedTuple):
    """What a request says of its sequence, and what tells its sequence from others.

    `id` is None for a request that is a sequence by itself. Sequences of two owners or streams are different ones, also with
    an equal `id`. `stream` is any object that stands for the connection, None without one. `wanted` are the outputs of
    states that the caller gets, too.
    """

    id: int | str | None
    owner: str = ""
    stream: object = None
    start: bool = False
    end: bool = False
    wanted: frozenset[str] = frozenset()


class Request:
    """One request.

    `names` are the inputs' names; None if the model function takes one bare array. `rows` is the size of axis 0.
    `deadline` is absolute, on the batcher's clock (inf for none). `complete` is called exactly once with the outcome,
    outside every lock, on a thread of the batcher or one that cancels; it must not block. The request refers to it only
    until then. Requests of equal `key` may share a batch. `priority` is the class, 1 the highest, 0 the default.

    `padding` is the plan of a padded request, else None. `key` must then be made of the plan's shapes instead of the
    request's own, and `nbytes` include its added bytes. `max_queue_time` is how many seconds the request may be queued,
    if the policy of its class allows requests to say so (see `QueuePolicy`). `tag` identifies the request in the record of
    the last batches; it should be small. `client` names the client (see `ClientPolicy`). `shared` has the positions, in
    `tensors`, of those without rows: the model gets them once per batch. Requests of equal `key` must have equal ones.
    `owner` is the caller's own; the parts of a split request have it too. `sequence` is what it says of its sequence, for a
    `StatefulBatcher`. `content` is None, or bytes that stand for its inputs: a batch has only one of several requests of equal
    content, and the others stay queued (see `AnswerCache`).

    One of a stage that is a pipeline may have a list of rows, which differ in shape, in place of a tensor.

    A request whose rows differ in shape may have `groups`: requests of equal rows, which hold the tensors and run in its
    place. `places` then has the place of each row among the rows of the groups.

    All other attributes belong to the batcher. Its queue's lock guards them.
    """

    __slots__ = (
        "arrival",
        "charged_share",
        "client",
        "complete",
        "content",
        "deadline",
        "groups",
        "key",
        "max_queue_time",
        "names",
        "nbytes",
        "order",
        "owner",
        "padding",
        "part_number",
        "pipeline_run",
        "places",
        "priority",
        "rank",
        "retried",
        "rows",
        "rows_counted",
        "sequence",
        "shared",
        "split_parts",
        "started",
        "state",
        "tag",
        "tensors",
        "timed_out",
    )

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        complete: Callable[[Outcome], None],
        *,
        names: tuple[str, ...] | None,
        rows: int,
        nbytes: int,
        key: Hashable = None,
        deadline: float = math.inf,
        priority: int = 0,
        padding: PadPlan | None = None,
        max_queue_time: float = math.inf,
        tag: object = None,
        client: str = "",
        shared: frozenset[int] = _NONE,
        owner: Any = None,
        sequence: SequenceTag | None = None,
        content: bytes | None = None,
    ) -> None:
        self.tensors = tensors
        self.shared = shared
        self.complete = complete
        self.names = names
        self.rows = rows
        # At least one, so that empty requests are bounded too.
        self.rows_counted = rows or 1
        self.nbytes = nbytes
        self.key = key
        self.deadline = deadline
        self.priority = priority
        # From 0, the highest. Each class has one rank, or two if its requests can be delayed.
        self.rank = 0
        self.padding = padding
        self.max_queue_time = max_queue_time
        self.tag = tag
        self.client = client
        self.owner = owner
        self.sequence = sequence
        self.content = content
        self.timed_out = False
        self.arrival = _NAN
        # Its number among the queued requests; a request that is queued again keeps it.
        self.order = 0
        self.started = _NAN
        self.state = NEW
        self.groups: Sequence[Request] = ()
        self.places: Array | None = None
        self.split_parts: tuple[Request, ...] = ()
        # 0, or the number of this part of a request that was split: 1 is the last.
        self.part_number = 0
        # What a pipeline knows of it, until it ends.
        self.pipeline_run: Any = None
        # It was queued again, because its device failed or its worker crashed.
        self.retried = False
        # With fair queueing, the share that was charged for it while it is in a batch.
        self.charged_share: Share | None = None

    def is_wanted(self, now: float) -> bool:
        """Return whether an answer after `now`, on the batcher's clock, can still reach the caller.

        False once the request was cancelled or has ended otherwise, and from its deadline on. Takes no lock: it may miss
        a cancel that happens at the same time.
        """
        return self.deadline > now and self.state is not DONE


def padded_length(batch: Sequence[Request]) -> int | None:
    """Return the length to which the rows of a batch are padded; None if they are not."""
    plan = batch[0].padding
    if plan is None:
        return None
    longest = max([plan.padded_length if each.padding is None else each.padding.length for each in batch])
    return min(math.ceil(longest / plan.step) * plan.step, plan.padded_length)


class CloseReason(enum.Enum):
    """Why a batch closed."""

    # Enum's own is pure Python and slow, and batches are counted in a dict by reason.
    __hash__ = object.__hash__

    FULL = "full"
    PREFERRED = "preferred"
    WINDOW = "window"
    IDLE = "idle"
    DRAIN = "drain"


class Share:
    """A client with queued requests: its `weight`, its `rows` in the queue, and its `virtual_start`."""

    __slots__ = ("rows", "virtual_start", "weight")

    def __init__(self, weight: int, virtual_start: float) -> None:
        self.weight = weight
        self.virtual_start = virtual_start
        self.rows = 0

    @property
    def load(self) -> float:
        """Its queued rows divided by its weight."""
        return self.rows / self.weight


class BatchAssignment(NamedTuple):
    """Work for a thread: complete the expired and the shed requests, and run the batch, which may be empty.

    The expired requests could not meet their deadlines any more. The shed ones were dropped so that others can.
    `predicted` is how long the batch should take until it is answered, in seconds; 0 if unknown. A full batch has
    `full_rows` rows. `requeued` gets the requests of the batch that go back into the queue after a failure. The queue's
    lock guards it.
    """

    batch: tuple[Request, ...]
    reason: CloseReason | None
    expired: tuple[Request, ...]
    shed: tuple[Request, ...]
    predicted: float
    full_rows: int
    requeued: list[Request]

    def kept(self) -> Sequence[Request]:
        """Return the requests of the batch that the thread still has: those that did not go back into the queue."""
        if not self.requeued:
            return self.batch
        gone = set(map(id, self.requeued))
        return [request for request in self.batch if id(request) not in gone]


class BatchRun(NamedTuple):
    """One run of a batch on the device of an `instance`, without its requests, so that it may be kept.

    With `again` it is a part of a batch that failed before. The batch was closed at `closed_at`, its join began at
    `join_start`, it was `ready` for the device, and its run `started` and `ended`. `done` receives one more time when
    all its requests are completed. `reason`, `predicted` and `full_rows` are those of the assignment, `step_ends` are as in
    `BatchInfo`.
    """

    instance: int
    again: bool
    reason: CloseReason | None
    predicted: float
    full_rows: int
    closed_at: float
    join_start: float
    ready: float
    started: float
    ended: float
    done: list[float]
    step_ends: Sequence[tuple[str, float]] = ()


class Recover(NamedTuple):
    """An order to a worker: recover its device, and report to the queue's `failures` whether that worked."""
