"""Triton's traces: which requests have one, and what is told of them, by its rules and in its names."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tensorferry.server.errors import InvalidRequestError
from tensorferry.server.models.registry import Model
from tensorferry.server.telemetry.trace_context import TraceContext
from tensorferry.server.tracing.trace import RequestTrace, Tracer
from tensorferry.server.tracing.triton_file import TraceFile, TraceFileSeries


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """With `timestamps` every `rate`-th request is traced, `count` more of them at most (-1: no limit).

    `log_frequency` is how many go into a file with a number of its own, 0 for all in one.
    """

    timestamps: bool = False
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


class _Setting:
    """Options in force, which of them were said here and not taken over, and what was sampled by them."""

    __slots__ = ("_left", "_options", "_seen", "sheet", "specified")

    def __init__(self, options: TraceOptions, specified: frozenset[str]) -> None:
        self._options = options
        self._left = options.count
        self._seen = 0
        self.specified = specified
        numbered = options.log_frequency > 0 or options.count >= 0
        self.sheet = TraceFileSeries(options.log_frequency if numbered else None)

    @property
    def options(self) -> TraceOptions:
        """The options, with what is left of the count."""
        return replace(self._options, count=self._left)

    @property
    def active(self) -> bool:
        """Whether a request may yet be traced."""
        return self._options.timestamps and self._left != 0

    def samples(self) -> bool:
        """Whether the request that is there now is traced."""
        if not self.active:
            return False
        self._seen += 1
        if self._seen % self._options.rate:
            return False
        if self._left > 0:
            self._left -= 1
        return True


class TritonTraceRecord:
    """A request on its way into a file. Implements `Sink`."""

    __slots__ = ("_file", "_number", "_sheet")

    # What a file has is no span.
    context = None

    def __init__(self, file: TraceFile, sheet: TraceFileSeries, number: int) -> None:
        self._file = file
        self._sheet = sheet
        self._number = number

    def completed(self, trace: RequestTrace) -> None:
        """Hands over the request's timeline: whoever has the answer finds it traced."""
        times = [
            # When the call began to wait for its message is not known: that it was there is all that is.
            ("GRPC_WAITREAD_START", trace.started),
            ("GRPC_WAITREAD_END", trace.started),
            ("REQUEST_START", trace.started),
            ("QUEUE_START", trace.queued),
        ]
        batch = trace.batch
        if batch is not None:
            began = batch.ended - batch.compute_time
            times += [
                ("COMPUTE_START", began - batch.input_time),
                ("COMPUTE_INPUT_END", began),
                ("COMPUTE_OUTPUT_START", batch.ended),
                ("COMPUTE_END", batch.ended + batch.output_time),
            ]
        times.append(("REQUEST_END", trace.completed_at))
        name, version = trace.addressed
        record = {
            "id": self._number,
            "model_name": name,
            "model_version": int(version),
            "request_id": trace.request_id,
            "timestamps": [{"name": name, "ns": round(seconds * 1e9)} for name, seconds in times],
        }
        self._file.write(self._sheet, record)

    def ended(self, trace: RequestTrace) -> None:
        """Triton's traces know no such time."""


class TritonTracing:
    """The settings of the server and of models, and the sampling by them. Implements `Source`. Thread-safe.

    A model has its own value of what was set for it, and the server's of everything else; what is
    cleared of the server's own is as at the start. Without a file nothing can be traced.
    """

    def __init__(self, file: TraceFile | None = None, tracing: Tracer | None = None) -> None:
        self._file = file
        self._tracing = tracing or Tracer()
        # Guards _server, _models, what each of these counts, _last and changes of active, of which `Tracer` is told.
        self._lock = threading.Lock()
        self._server = _Setting(TraceOptions(), frozenset())
        self._models: dict[str, _Setting] = {}
        self._last = 0
        # Whether any request may be traced.
        self.active = False

    @property
    def file(self) -> str:
        """Where traces are written; empty for nowhere."""
        return "" if self._file is None else str(self._file.path)

    def options(self, model: str) -> TraceOptions:
        """What is in force for a model, or "" for the server."""
        with self._lock:
            return self._models.get(model, self._server).options

    def change(self, model: str, changes: Mapping[str, bool | int | None]) -> None:
        """Sets options by their names, for a model or ("") the server; None clears one.

        InvalidRequestError, and nothing is changed, if the whole is not one to trace by.
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
            self._note_active_locked()

    def sample(self, model: Model | None, parent: TraceContext | None = None) -> TritonTraceRecord | None:
        """What is kept of a request for this model; None if nothing is. A caller's own trace changes nothing."""
        if model is None:
            # Settings are of models that there are.
            return None
        with self._lock:
            setting = self._models.get(model.name, self._server)
            if self._file is None or not setting.samples():
                return None
            self._last += 1
            number = self._last
            if not setting.active:
                self._note_active_locked()
        return TritonTraceRecord(self._file, setting.sheet, number)

    def _changed(
        self, setting: _Setting | None, otherwise: TraceOptions, changes: Mapping[str, bool | int | None]
    ) -> _Setting:
        before = setting.specified if setting is not None else frozenset()
        said = {name for name, value in changes.items() if value is not None}
        specified = (before | said) - (changes.keys() - said)
        current = setting.options if setting is not None else otherwise
        values = {name: changes.get(name, getattr(current, name)) for name in specified}
        options = replace(otherwise, **values)
        wrong = "sample rate must be non-zero" if options.rate == 0 else ""
        if self._file is None:
            wrong = wrong or "trace file name is not given; the server's operator does that, by --trace-file"
        if options.timestamps and wrong:
            raise InvalidRequestError(f"Attempting to set invalid trace setting :{wrong}")
        return _Setting(options, frozenset(specified))

    def _note_active_locked(self) -> None:
        self.active = any(setting.active for setting in (self._server, *self._models.values()))
        self._tracing.switch(self, on=self.active)
