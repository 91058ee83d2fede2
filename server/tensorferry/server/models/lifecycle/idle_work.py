"""Work on models while the server is idle: comparisons that take longer than a load may, and layouts of the cores.

A model whose rows were not compared is loaded again, without a limit of time. With `--instances auto`, a model's layouts of
the cores are measured, and it is loaded again in the best.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tensorferry.batcher import StatefulBatcher
from tensorferry.batcher.learning.paying_rows import powers_of_two
from tensorferry.server.config.server_config import ModelSource, ServerConfig
from tensorferry.server.errors import ServerError, StartError
from tensorferry.server.models.lifecycle.loader import declared_onnx
from tensorferry.server.models.lifecycle.model import Model
from tensorferry.server.models.lifecycle.registry import ModelRegistry
from tensorferry.server.onnx.loading.chosen_layout import ChosenLayout
from tensorferry.server.onnx.loading.preparation import PreparedModel, prepare_model
from tensorferry.server.onnx.measuring.core_layouts import LAYOUT_RULE, Layout, LayoutTime, better_layout
from tensorferry.server.onnx.measuring.measurements import Measurements, measure_file
from tensorferry.server.onnx.measuring.measuring_child import MeasuredModel
from tensorferry.server.processes.child import Child
from tensorferry.server.runtime.checks.load_budget import LoadBudget
from tensorferry.server.runtime.checks.sampling import varies
from tensorferry.server.runtime.files.file_record import FileRecord
from tensorferry.server.system.threads import ThreadKind, new_thread
from tensorferry.serving import OnnxModel

_log = logging.getLogger("tensorferry.server")

# The server is idle if it gets no request in this time. Sizes and layouts of a model may take _MEASURE_SECONDS together.
_IDLE_SECONDS = 5.0
_MEASURE_SECONDS = 60.0

_KEPT = "model %s: --instances auto keeps one session: %s"

_Load = Callable[[ModelSource, Callable[[], LoadBudget]], Model]
_Measure = Callable[[MeasuredModel, Callable[[Child], None]], Measurements]


class IdleWork:
    """Work on one model after the other, on its own thread. Call `start`, `end` and `close`; other methods are thread-safe.

    `load` loads a model again, with the budget of its checks, and `replace` lets it serve in place of another, unless that
    serves no more. Work during which requests came is repeated later, because they take the cores from each other.
    """

    def __init__(
        self,
        config: ServerConfig,
        registry: ModelRegistry,
        load: _Load,
        replace: Callable[[Model, Model], bool],
        measure: _Measure = measure_file,
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        self._config = config
        self._registry = registry
        self._load = load
        self._replace = replace
        self._measure = measure
        self._idle_seconds = idle_seconds
        # Names and versions, so that no model is kept in memory that was unloaded.
        self._waiting: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        # The files that they were loaded from. Each operation is atomic.
        self._files: dict[tuple[str, str], FileRecord] = {}
        self._closed = threading.Event()
        # Guards the fields below, so that nothing is started after `end`. No waiting while it is held.
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._may_start = False
        self._thread = new_thread("idle-work", self._run, ThreadKind.EXPENDABLE)

    def start(self) -> None:
        """Start the thread once there is work."""
        with self._lock:
            self._may_start = True
            self._start_if_needed_locked()

    def _start_if_needed_locked(self) -> None:
        if self._may_start and not self._closed.is_set() and not self._waiting.empty():
            self._may_start = False
            self._thread.start()

    def add(self, model: Model) -> None:
        """Work on a model with an `open_layout` or `open_checks` once it is idle, or on the one that serves in its place by then."""
        source = model.open_checks or model.open_layout
        if source is None:
            return
        self._files[model.name, model.version] = FileRecord(_file_of(source))
        self._waiting.put((model.name, model.version))
        with self._lock:
            self._start_if_needed_locked()

    def end(self) -> None:
        """Load no model again, and end the child process. Idempotent."""
        self._closed.set()
        self._waiting.put(None)
        with self._lock:
            child = self._child
        if child is not None:
            child.kill()

    def close(self, timeout: float) -> bool:
        """Wait for the thread's end, after `end`; return false if it has not ended: making a session cannot be interrupted."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (which := self._waiting.get()) is not None and not self._closed.is_set():
            try:
                if not self._work(*which):
                    self._waiting.put(which)
            # An OSError is for instance that no process can be started now.
            except (ServerError, StartError, OSError) as error:
                _log.warning("model %s stays as it is: %s", which[0], error)

    def _work(self, name: str, version: str) -> bool:
        """Work on a model, unless the server is not idle; return False if something is left for later."""
        before = self._accepted()
        if self._closed.wait(self._idle_seconds):
            return True
        if not self._registry.complete or self._accepted() != before:
            return False
        # It may have replaced the model that was added.
        model = self._registry.get(name, version)
        if model.open_layout is None and model.open_checks is None:
            return True
        if isinstance(model.batcher, StatefulBatcher):
            _log.warning("model %s stays as it is, because another load would end its sequences", name)
            return True
        if model.open_checks is not None:
            return self._finish_checks(model.open_checks, model, before)
        assert model.open_layout is not None
        return self._choose_layout(model.open_layout, model, before)

    def _finish_checks(self, source: ModelSource, model: Model, before: int) -> bool:
        """Load a model again, and let its checks take the time that they need while no request comes."""

        def is_idle() -> bool:
            return not self._closed.is_set() and self._accepted() == before

        replacement = self._load(source, partial(LoadBudget, math.inf, goes_on=is_idle))
        if replacement.open_checks is not None:
            _end(replacement)
            return False
        _log.info(
            "model %s: its checks were finished while the server was idle: %s",
            source.name,
            replacement.batching,
        )
        return not self._let_serve(source, model, replacement) or replacement.open_layout is None

    def _let_serve(self, source: ModelSource, model: Model, replacement: Model) -> bool:
        reason = self._reason_to_keep(source, replacement)
        if reason:
            _log.warning("model %s stays as it is, because %s", model.name, reason)
        replaced = not reason and self._replace(model, replacement)
        if not replaced:
            _end(replacement)
        return replaced

    def _reason_to_keep(self, source: ModelSource, replacement: Model) -> str:
        """Return why a model must not be replaced; "" if it may."""
        name, version = replacement.name, replacement.version
        if self._files[name, version].has_changed():
            return "its files have changed since it was loaded; load it again"
        for user in self._registry.users(name):
            for used in user.uses:
                if used.name == name and (reason := replacement.misfit(used)):
                    return f"steps of model {user.name!r} could not use it any more: {reason}"
        return ""

    def _choose_layout(self, source: ModelSource, model: Model, before: int) -> bool:
        """Measure a model's layouts, and let it serve in the best; return False if it is to be measured later.

        A model with variable axes is measured with the lengths of its last request, so it must have had one.
        """
        name = source.name
        used = not varies(model.signature) or model.batcher.statistics().accepted
        if not used:
            return False
        file, options = source, self._config.for_model(name)
        if isinstance(source.declaration, OnnxModel):
            file, options = declared_onnx(source, source.declaration, options)
        with ExitStack() as files:
            prepared = prepare_model(file, options, "cpu", files)
            layouts, measured_model = prepared.layouts, _measured_model(prepared, model)
            # Its session holds memory, and the process that measures makes its own.
            del prepared
            if measured_model is None:
                _log.warning(_KEPT, name, "it does not run on random input")
                return True
            measured = self._measure(measured_model, self._keep)
        if self._accepted() != before:
            return False
        if not self._closed.is_set():
            self._apply(source, model, layouts, measured)
        return True

    def _apply(
        self, source: ModelSource, model: Model, layouts: ChosenLayout, measured: Measurements
    ) -> None:
        if len(measured.layouts) < len(layouts.layouts):
            reason = measured.stopped or "there is too little memory or time for more"
            _log.warning(_KEPT, source.name, f"not all layouts were measured: {reason}")
            return
        one, better = measured.layouts[0], better_layout(measured.layouts)
        chosen = better or one
        layouts.keep(Layout(chosen.sessions, chosen.threads))
        if better is None:
            _log.info(_KEPT, source.name, f"no other layout carries {LAYOUT_RULE} more rows")
            return
        if layouts.open:
            _log.warning(_KEPT, source.name, "the cache of checks cannot be written; give it a directory")
            return
        if self._let_serve(source, model, self._load(source, LoadBudget)):
            _log.info("model %s: --instances auto: %s", source.name, _described(one, better))

    def _accepted(self) -> int:
        """Return the requests to all models."""
        return sum(model.batcher.statistics().accepted for model in self._registry.models())

    def _keep(self, child: Child) -> None:
        """Let `end` kill the child."""
        with self._lock:
            self._child = child
        if self._closed.is_set():
            child.kill()


def _end(model: Model) -> None:
    """End a model that never served."""
    model.batcher.close(drain=False)
    model.release()


def _file_of(source: ModelSource) -> Path:
    path, declared = source.path, source.declaration
    return path.parent / declared.path if isinstance(declared, OnnxModel) and not declared.address else path


def _lengths_of_last_request(model: Model) -> Mapping[str, int]:
    """Return the lengths of the inputs' variable axes by name, as the last request that can share a batch had them."""
    keys = [key for key in model.batcher.statistics().buckets if isinstance(key, tuple)]
    if not keys:
        return {}
    # The shapes of the inputs without the batch axis, perhaps with the values of inputs that rows share.
    shapes = keys[-1][0] if model.signature.shared_inputs(batched=model.batched) else keys[-1]
    lengths = {}
    for spec, shape in zip(model.signature.inputs, shapes, strict=False):
        if spec.has_row_axis:
            named = zip(spec.dims[1:], shape, strict=False)
            lengths.update({dim: length for dim, length in named if isinstance(dim, str) and dim})
    return lengths


def _measured_model(prepared: PreparedModel, model: Model) -> MeasuredModel | None:
    """Return what is measured; None if the model does not run on random input."""
    if prepared.working_size is None:
        return None
    return MeasuredModel(
        prepared.file,
        "cpu",
        prepared.settings.ort_options,
        prepared.io_mapping,
        prepared.working_size,
        powers_of_two(max(1, prepared.settings.max_batch_size)),
        _MEASURE_SECONDS,
        _lengths_of_last_request(model),
        layouts=prepared.layouts.layouts,
        background=True,
    )


def _described(one: LayoutTime, better: LayoutTime) -> str:
    return (
        f"{better.sessions} sessions of {better.threads} threads carry {better.rows_per_second / one.rows_per_second:.2f} "
        f"times the rows of one session; a lone row takes {better.ms_alone:.3g} ms instead of {one.ms_alone:.3g} ms"
    )
