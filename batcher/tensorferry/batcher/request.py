"""One request: its tensors, its rows, and the completion that it must reach exactly once."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorferry.batcher.padding import PadPlan

Array = npt.NDArray[Any]


class Tensor(NamedTuple):
    """One input of a request: `shape` with rows on axis 0, and its elements in row-major order.

    `data` is anything that `bytes.join` takes (bytes, memoryview, contiguous array), so that
    the bytes of a request can stay as they came until they are joined into a batch. For a
    dtype of objects it is a numpy object array of that shape.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: Any


class State(enum.Enum):
    """Where a request is. DONE is terminal: its completion was, or is just being, called."""

    NEW = "new"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


# For what is done for each request: to look a member up costs more than to assign it.
NEW, QUEUED, RUNNING, DONE = State

# Any constant: to make a new one costs time for each request.
_NAN = math.nan
_UNORDERED = (math.inf, 0)
_NONE: frozenset[int] = frozenset()


class BatchInfo(NamedTuple):
    """The batch that a request rode in; times in seconds.

    `number` runs from 1. `reason` says why it left, `predicted` how long it was expected to
    take when it did (0: nothing was known yet), `compute_time` how long the model took.
    `padded_length` is the length that its rows were padded to, None when they were not. `input_time`
    went into joining, `output_time` is from the model's end until the answers were handed out. That
    end was at `ended` on the batcher's clock.
    """

    number: int
    requests: int
    rows: int
    compute_time: float
    reason: CloseReason | None = None
    predicted: float = 0.0
    padded_length: int | None = None
    input_time: float = 0.0
    output_time: float = 0.0
    ended: float = _NAN


class Outcome(NamedTuple):
    """What became of a request: `outputs` or `error`, never both.

    `outputs` has the form that the model function returned, cut to the request's rows; arrays
    in it are views of the batch's outputs. `batch` is None when the request never ran, or ended by an error;
    `queue_delay` in seconds, 0 if it never left the queue, `position` the request's place in the batch, from 0, `priority` its
    class, 1 the highest.
    """

    outputs: Any = None
    error: BaseException | None = None
    batch: BatchInfo | None = None
    queue_delay: float = 0.0
    position: int = 0
    priority: int = 1


class Request:
    """One request on its way through a batcher.

    `names` are the inputs' names, or None when the model function takes one bare array.
    `rows` is the size of axis 0, `deadline` an absolute time on the batcher's clock (inf for
    none), `complete` the callback that gets the outcome: it is called exactly once, outside
    every lock, on a thread of the batcher's or of whoever cancels, and must not block.
    Requests of one `key` may share a batch. `priority` is the class, 1 the highest, 0 the default.

    `padding` is the plan of a request that is padded (None: it is not). `key` must then be made
    of the plan's shapes instead of the request's own, and `nbytes` have its added bytes. `max_queue_time` is how
    many seconds it may be queued, where the policy of its class lets requests say (see `QueuePolicy`). `tag` is
    by what people know it, in the record of the last batches: anything small, that is not asked for otherwise.
    `client` is whose it is, where clients are told apart (see `ClientPolicy`). `shared` has the places, in `tensors`,
    of those without rows: the model gets them once for a batch. Requests of one `key` must have equal ones.

    All other attributes belong to the batcher and are guarded by its queue's lock.
    """

    __slots__ = (
        "arrival",
        "charged_share",
        "client",
        "complete",
        "deadline",
        "edf_key",
        "is_split_part",
        "key",
        "max_queue_time",
        "names",
        "nbytes",
        "padding",
        "priority",
        "rank",
        "retried",
        "rows",
        "rows_counted",
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
    ) -> None:
        self.tensors = tensors
        self.shared = shared
        self.complete = complete
        self.names = names
        self.rows = rows
        # The rows that it counts for: at least one, so that empty requests are bounded too.
        self.rows_counted = rows or 1
        self.nbytes = nbytes
        self.key = key
        self.deadline = deadline
        self.priority = priority
        # The rank by which it rides, from 0, once the default class is known.
        self.rank = 0
        self.padding = padding
        self.max_queue_time = max_queue_time
        self.tag = tag
        self.client = client
        self.timed_out = False
        self.arrival = _NAN
        # Of those with a deadline, once queued: by that, and among equal ones by arrival.
        self.edf_key: tuple[float, int] = _UNORDERED
        self.started = _NAN
        self.state = NEW
        self.split_parts: tuple[Request, ...] = ()
        # Of another request that was split.
        self.is_split_part = False
        # What ran it failed through no fault of its own, and it went back into the queue.
        self.retried = False
        # Where clients share batches: whose turn moved on for it as it rode, until it is put back.
        self.charged_share: Share | None = None


def flatten(requests: Sequence[Request]) -> Iterator[Request]:
    """The requests that are queued: a split one's parts, any other itself."""
    for request in requests:
        yield from request.split_parts or (request,)


class CloseReason(enum.Enum):
    """Why a batch left."""

    # That of `Enum` is a method in Python, and batches are counted by their reason.
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
    """What a worker has to do: complete the expired and the shed, run the batch (which may be empty).

    The expired could not make their deadlines any more; the shed were dropped so that others
    can. `predicted` is how long the batch should take until it is answered, in seconds; 0 when
    nothing is known.
    """

    batch: tuple[Request, ...]
    reason: CloseReason | None
    expired: tuple[Request, ...]
    shed: tuple[Request, ...] = ()
    predicted: float = 0.0


class BatchRun(NamedTuple):
    """One run of a batch: that of an assignment, or a part of it that runs again."""

    batch: Sequence[Request]
    assignment: BatchAssignment
    times: Times
    instance: int

    @property
    def is_part(self) -> bool:
        """Whether the batch is a part of one that failed before."""
        return self.batch is not self.assignment.batch


class Recover(NamedTuple):
    """An order to a worker: recover its device, and tell the queue's `failures` whether that worked."""


class Times(NamedTuple):
    """When a batch began to be joined and was ready for the device, when that started on it, and had run it.

    `done` gets the one moment that is known only after the answers: when all are handed out.
    """

    begun: float
    ready: float
    started: float
    ended: float
    done: list[float]
