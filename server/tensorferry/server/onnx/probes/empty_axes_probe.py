"""Probe that finds, after a model was loaded, which axes of its inputs may have length zero.

The model runs in a child process, because ONNX Runtime may crash. Until the probe ends, requests with such axes are refused.
Which operators crash is not known, so every model with variable axes is probed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tensorferry.server.models.config_pbtxt.io_mapping import IoMapping
from tensorferry.server.processes.child import Child, Outcome, run_in_child
from tensorferry.server.runtime.axes import AxisSet, EmptyAxes, axis_sets_to_test
from tensorferry.server.runtime.checks.check_cache import CheckCache
from tensorferry.server.runtime.checks.sampling import random_array
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.runtime.session import Session
from tensorferry.server.system.threads import ThreadKind, new_thread

_log = logging.getLogger("tensorferry.server")

# Time limits of loading the model, and of one run.
_LOAD_SECONDS, _RUN_SECONDS = 120, 20
# Most child processes for one model. Axes that are left then are not known to be safe.
_MOST_CHILDREN = 8
# Signals that the model causes. Others, such as SIGKILL and SIGTERM, say nothing about the model.
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)

_CRASHED = "with it ONNX Runtime crashes"
_HUNG = "with it the model does not end"
_FAILED = "with it the model fails"
_UNKNOWN = "this could not be tested"
_NOT_TESTED = "model %s: axes of length zero could not be tested, so requests with them are refused: %s"


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """A run with inputs of these shapes, with random values or with zeros."""

    shapes: Mapping[str, tuple[int, ...]]
    zeros: bool


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """The model to probe.

    `path` is the file to run, which may be converted. `working_size` is a length of dynamic axes with
    which the model runs; None if none is known, and then nothing is probed.
    """

    name: str
    path: Path
    ort_options: OrtOptions
    io_mapping: IoMapping
    max_batch_size: int
    working_size: int | None


class EmptyAxesProbe:
    """Probes a model on its own thread, unless the result is cached. `found` has the result.

    `files` is closed when the file to run is no longer needed. `start` is called at most once; `close` kills a child process
    that still runs.
    """

    def __init__(self, model: ProbedModel, cache: CheckCache, files: ExitStack | None = None) -> None:
        self._model = model
        self._cache = cache
        self._files = files or ExitStack()
        axes = axis_sets_to_test(model.io_mapping.signature, batched=model.max_batch_size > 0)
        if model.working_size is None:
            axes = []
        self._runs = {each: _probe_runs(model, each) for each in axes}
        self._conditions = list(self._runs.values())
        self.found = EmptyAxes(_decode(cache.get("empty-axes", self._conditions), axes) if axes else {})
        # Guards _child and _closed, so that no child lives on after `close`. No waiting while it is held.
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if there is something to probe."""
        if self.found.verdicts is not None:
            self._files.close()
            return
        self._thread = new_thread(
            f"tensorferry-empty-axes-{self._model.name}", self._run, ThreadKind.EXPENDABLE
        )
        self._thread.start()

    def close(self) -> None:
        """End the probe; return when it has ended."""
        with self._lock:
            self._closed = True
            child = self._child
        if child is not None:
            child.kill()
        self.wait()

    def wait(self) -> None:
        """Wait for the end of the probe."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        verdicts: Mapping[AxisSet, str] = {}
        try:
            verdicts, reproducible = self._verdicts()
            if reproducible:
                kept = [[sorted(each), reason] for each, reason in verdicts.items()]
                self._cache.put("empty-axes", self._conditions, kept)
        except Exception as error:
            _log.warning(_NOT_TESTED, self._model.name, repr(error))
        finally:
            self.found.verdicts = verdicts
            self._files.close()
        for axes, reason in verdicts.items():
            if reason in (_CRASHED, _HUNG):
                found = " and ".join(f"axis {axis} of {name!r}" for name, axis in sorted(axes))
                text = "model %s: requests with no element along %s are refused: %s"
                _log.info(text, self._model.name, found, reason)

    def _verdicts(self) -> tuple[dict[AxisSet, str], bool]:
        """Return the verdicts, and whether another load would give the same."""
        verdicts = dict.fromkeys(self._runs, _UNKNOWN)
        left = [(axes, run) for axes, some in self._runs.items() for run in some]
        for _ in range(_MOST_CHILDREN):
            outcome = self._run_child([run for _, run in left])
            if outcome is None:
                return verdicts, False
            done = outcome.sent[1:]
            for (axes, _), sent in zip(left, done, strict=False):
                if sent["answered"]:
                    verdicts[axes] = ""
                elif verdicts[axes]:
                    verdicts[axes] = _FAILED
            if len(done) == len(left):
                return verdicts, True
            fatal = left[len(done)][0]
            if not outcome.late and outcome.status.signal not in _CRASHES:
                verdicts.update({axes: _UNKNOWN for axes, _ in left[len(done) :]})
                return verdicts, False
            reason = _HUNG if outcome.late else _CRASHED
            verdicts.update({axes: reason for axes in verdicts if fatal <= axes})
            left = [(axes, run) for axes, run in left[len(done) + 1 :] if not fatal <= axes]
            if not left:
                return verdicts, True
        verdicts.update({axes: _UNKNOWN for axes, _ in left})
        return verdicts, True

    def _run_child(self, runs: Sequence[ProbeRun]) -> Outcome | None:
        """Return what came of these runs until a child's end; None if it could not load the model, or after `close`."""
        model = self._model
        argument = model.path, model.ort_options, runs
        outcome = run_in_child(_run_in_child, argument, _LOAD_SECONDS, _RUN_SECONDS, self._keep)
        with self._lock:
            closed = self._closed
        if outcome.sent:
            return outcome
        if not closed:
            _log.warning(_NOT_TESTED, model.name, "the model does not load on the CPU")
        return None

    def _keep(self, child: Child) -> None:
        """Let `close` kill the child."""
        with self._lock:
            self._child = child
            closed = self._closed
        if closed:
            child.kill()


def _run_in_child(
    argument: tuple[Path, OrtOptions, Sequence[ProbeRun]], send: Callable[[Mapping[str, Any]], None]
) -> None:
    """Load the model, send that, and send of each run whether it answered."""
    path, ort_options, runs = argument
    # Requests to models that serve come first.
    os.nice(19)
    session = Session(path, "cpu", ort_options)
    send({"loaded": True})
    for run in runs:
        generator = np.random.default_rng(0)
        inputs = {}
        for spec in session.signature.inputs:
            array = random_array(spec, run.shapes[spec.name], generator)
            inputs[spec.name] = np.zeros_like(array) if run.zeros and spec.datatype.size else array
        answered = False
        with suppress(Exception):
            session.run(inputs)
            answered = True
        send({"answered": answered})


def _probe_runs(model: ProbedModel, axes: AxisSet) -> list[ProbeRun]:
    """Return runs with length zero along these axes: with one row, some rows and a full batch, and two kinds of values."""
    most = model.max_batch_size
    runs = []
    for rows in sorted({1, min(3, most), most}) if most else [1]:
        shapes = {}
        for spec in model.io_mapping.signature.inputs:
            sizes = (rows, *[model.working_size or 1] * (len(spec.dims) - 1))
            shape = tuple(
                0 if (spec.name, axis) in axes else dim if isinstance(dim, int) else size
                for axis, (dim, size) in enumerate(zip(spec.dims, sizes, strict=False))
            )
            # Strides of zero, so that a large input needs no memory.
            given: Any = np.broadcast_to(np.uint8(0), shape)
            if spec.name in model.io_mapping.inputs:
                given = model.io_mapping.inputs[spec.name].to_model(given)
            shapes[spec.name] = given.shape
        runs += [ProbeRun(shapes, zeros) for zeros in (False, True)]
    return runs


def _decode(cached: Any, axes: Sequence[AxisSet]) -> Mapping[AxisSet, str] | None:
    """Return cached verdicts; None if they are not a result for these axes."""
    try:
        verdicts = {
            frozenset((str(name), int(axis)) for name, axis in each): str(reason) for each, reason in cached
        }
    except (TypeError, ValueError):
        return None
    return verdicts if verdicts.keys() == set(axes) else None
