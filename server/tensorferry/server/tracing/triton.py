"""Triton's request traces: sampling by its rules, and records with its field names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from tensorferry.batcher import BatchInfo, StageOutcome
from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.models.registry import Model
from tensorferry.server.telemetry.trace_context import TraceContext
from tensorferry.server.tracing.trace import RequestTrace, Tracer
from tensorferry.server.tracing.triton_file import TraceFile, TraceFileSeries


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Trace settings: with `timestamps`, every `rate`-th request is traced, at most `count` more (-1: no limit).

    `log_frequency` is the number of traces in each numbered file; 0 means one file for all.
    """

    timestamps: bool = False
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


class _Setting:
    """Options in force, the names of those that were set explicitly, and the state of sampling."""

    __slots__ = ("_options", "_remaining", "_seen", "series", "specified")

    def __init__(self, options: TraceOptions, specified: frozenset[str]) -> None:
        self._options = options
        self._remaining = options.count
        self._seen = 0
        self.specified = specified
        numbered = options.log_frequency > 0 or options.count >= 0
        self.series = TraceFileSeries(options.log_frequency if numbered else None)

    @property
    def options(self) -> TraceOptions:
        """The options, with the remaining count."""
        return replace(self._options, count=self._remaining)

    @property
    def active(self) -> bool:
        """Whether requests can still be traced."""
        return self._options.timestamps and self._remaining != 0

    def samples(self) -> bool:
        """Count a request. Return whether to trace it."""
        if not self.active:
            return False
        self._seen += 1
        if self._seen % self._options.rate:
            return False
        if self._remaining > 0:
            self._remaining -= 1
        return True


class TritonTraceRecord:
    """Trace of a request for a trace file. Implements `TraceSink`."""

    __slots__ = ("_file", "_new_number", "_number", "_series")

    # A record in a file is not a span.
    context = None

    def __init__(
        self, file: TraceFile, series: TraceFileSeries, number: int, new_number: Callable[[], int]
    ) -> None:
        self._new_number = new_number
        self._file = file
        self._series = series
        self._number = number

    def completed(self, trace: RequestTrace) -> None:
        """Queue the request's timeline, so that it is written even if the client acts on the response at once."""
        times = [
            # The start of the wait for the message is unknown, so its arrival is used.
            ("GRPC_WAITREAD_START", trace.started),
            ("GRPC_WAITREAD_END", trace.started),
            ("REQUEST_START", trace.started),
            ("QUEUE_START", trace.queued),
        ]
        if trace.batch is not None and not trace.stages:
            times += _compute_times(trace.batch)
        times.append(("REQUEST_END", trace.completed_at))
        name, version = trace.addressed
        record = {
            "id": self._number,
            "model_name": name,
            "model_version": int(version),
            "request_id": trace.request_id,
            "timestamps": _timestamps(times),
        }
        self._file.write(self._series, record, *self._stage_records(trace, trace.stages, self._number))

    def _stage_records(
        self, trace: RequestTrace, stages: Sequence[StageOutcome], parent: int
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the records of a pipeline's stages, as Triton writes those of the models of an ensemble."""
        for stage in stages:
            number, batch = self._new_number(), stage.batch
            end = trace.completed_at if batch is None else batch.ended + batch.output_time
            arrival = stage.arrival if stage.arrival == stage.arrival else end
            times = [("REQUEST_START", arrival), ("QUEUE_START", arrival)]
            if batch is not None and not stage.stages:
                times += _compute_times(batch)
            yield {
                "id": number,
                "parent_id": parent,
                "model_name": stage.stage,
                "model_version": int(trace.addressed[1]),
                "request_id": trace.request_id,
                "timestamps": _timestamps([*times, ("REQUEST_END", end)]),
            }
            yield from self._stage_records(trace, stage.stages, number)

    def ended(self, trace: RequestTrace) -> None:
        """Do nothing: Triton's traces have no such time."""


def _compute_times(batch: BatchInfo) -> list[tuple[str, float]]:
    began = batch.ended - batch.compute_time
    return [
        ("COMPUTE_START", began - batch.input_time),
        ("COMPUTE_INPUT_END", began),
        ("COMPUTE_OUTPUT_START", batch.ended),
        ("COMPUTE_END", batch.ended + batch.output_time),
    ]


def _timestamps(times: Sequence[tuple[str, float]]) -> Sequence[Mapping[str, Any]]:
    return [{"name": name, "ns": round(seconds * 1e9)} for name, seconds in times]


class TritonTracing:
    """Trace settings of the server and of models, and sampling by them. Implements `TraceSource`. Thread-safe.

    A model has its own value for each option that was set for it, and the server's value for others. Clearing an option
    of the server restores its default. Without a file, tracing cannot be enabled.
    """

    traces_calls = False

    def __init__(self, file: TraceFile | None = None, tracing: Tracer | None = None) -> None:
        self._file = file
        self._tracing = tracing or Tracer()
        # Guards _server, _models, their sampling state, and writes of active. `Tracer.switch` is called while it
        # is held.
        self._lock = threading.Lock()
        self._server = _Setting(TraceOptions(), frozenset())
        self._models: dict[str, _Setting] = {}
        # Returns the next number of a trace, in one call that no other thread can interrupt.
        self._new_number = count(1).__next__
        # Whether any request can be traced.
        self.active = False

    @property
    def file(self) -> str:
        """Path of the trace file, or an empty string."""
        return "" if self._file is None else str(self._file.path)

    def options(self, model: str) -> TraceOptions:
        """Return the options of a model, or of the server if `model` is empty."""
        with self._lock:
            return self._models.get(model, self._server).options

    def change(self, model: str, changes: Mapping[str, bool | int | None]) -> None:
        """Set options of a model, or of the server if `model` is empty. None clears an option.

        InvalidRequestError, without any change, if the resulting options are invalid.
        """
        with self._lock:
            server, models = self._server, dict(self._models)
            if model:
                models[model] = self._changed(models.get(model), server.options, changes)
                if not models[model].specified:
                    del models[model]
            else:
                server = self._changed(server, TraceOptions(), changes)
                models = {
                    name: self._changed(setting, server.options, {}) for name, setting in models.items()
                }
            self._server, self._models = server, models
            self._update_active_locked()

    def sample(self, model: Model | None, parent: TraceContext | None = None) -> TritonTraceRecord | None:
        """Return the record of a request for this model, or None. The caller's own trace has no effect."""
        if model is None:
            # Settings apply only to known models.
            return None
        with self._lock:
            setting = self._models.get(model.name, self._server)
            if self._file is None or not setting.samples():
                return None
            number = self._new_number()
            if not setting.active:
                self._update_active_locked()
        return TritonTraceRecord(self._file, setting.series, number, self._new_number)

    def _changed(
        self, setting: _Setting | None, defaults: TraceOptions, changes: Mapping[str, bool | int | None]
    ) -> _Setting:
        before = setting.specified if setting is not None else frozenset()
        given = {name for name, value in changes.items() if value is not None}
        specified = (before | given) - (changes.keys() - given)
        current = setting.options if setting is not None else defaults
        values = {name: changes.get(name, getattr(current, name)) for name in specified}
        options = replace(defaults, **values)
        wrong = "sample rate must be non-zero" if options.rate == 0 else ""
        if self._file is None:
            wrong = wrong or "trace file name is not given; the server's operator does that, by --trace-file"
        if options.timestamps and wrong:
            raise InvalidRequestError(f"Attempting to set invalid trace setting :{wrong}")
        return _Setting(options, frozenset(specified))

    def _update_active_locked(self) -> None:
        self.active = any(setting.active for setting in (self._server, *self._models.values()))
        self._tracing.switch(self, on=self.active)
