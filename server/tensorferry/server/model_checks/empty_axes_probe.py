"""Finds out at load which axes of a model's inputs may have length zero, in a process that may die of it."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tensorferry.server.model_checks.empty_axes_child import (
    ANSWERED,
    LOAD_SECONDS,
    LOADED,
    ProbeRun,
    ProbeRuns,
)
from tensorferry.server.model_checks.probe_cache import ProbeCache, digest_of
from tensorferry.server.model_config.io_mapping import IoMapping
from tensorferry.server.runtime.ort import onnxruntime
from tensorferry.server.runtime.ort_options import OrtOptions
from tensorferry.server.shapes.empty_axes import AxisSet, EmptyAxes, axis_sets_to_test

_log = logging.getLogger("tensorferry.server")

# How long one run may take.
_RUN_SECONDS = 20
# Grows when what is tried, or how it is kept, changes.
_VERSION = 1
# More are not started for one model: what is left then is not known to be safe.
_MOST_CHILDREN = 8
# Deaths that the model is the cause of. By others (SIGKILL, SIGTERM) nothing is learned.
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGALRM)

_CRASHED = "with it ONNX Runtime ends its process"
_HUNG = "with it the model does not end"
_FAILED = "with it the model fails"
_UNKNOWN = "this could not be tried"


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """The model to try: its file, what is run (`path` may be `source`, converted), and how clients see it.

    `size` is a length of open axes with which it runs; None where none is known, and nothing can then be tried.
    One run may take `run_seconds`.
    """

    name: str
    source: Path
    path: Path
    settings: OrtOptions
    io_mapping: IoMapping
    max_batch_size: int
    size: int | None
    run_seconds: int = _RUN_SECONDS


class EmptyAxesProbe:
    """Tries a model on a thread of its own, while it is loaded; `result` waits for that.

    Leaving the `with` block ends the child process, if it still runs.
    """

    def __init__(self, subject: ProbedModel) -> None:
        self._subject = subject
        self._result = EmptyAxes()
        # Guards _child and _closed, so that no child is started once the block was left. Nothing waits meanwhile.
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> EmptyAxesProbe:
        axes = axis_sets_to_test(self._subject.io_mapping.signature, batched=self._subject.max_batch_size > 0)
        if axes and self._subject.size is not None:
            self._thread = threading.Thread(
                target=self._run, args=(axes,), name=f"tensorferry-empty-axes-{self._subject.name}"
            )
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            child = self._child
        if child is not None:
            child.kill()
        if self._thread is not None:
            self._thread.join()

    def result(self) -> EmptyAxes:
        """What was found out; waits for it."""
        if self._thread is not None:
            self._thread.join()
        for axes, reason in self._result.verdicts.items():
            if reason in (_CRASHED, _HUNG):
                _log.info(
                    "model %s: requests with no element along %s are refused: %s",
                    self._subject.name,
                    _words(axes),
                    reason,
                )
        return self._result

    def _run(self, axes: Sequence[AxisSet]) -> None:
        try:
            self._result = self._found(axes)
        except Exception as error:
            _log.warning(
                "model %s: it could not be tried with axes of length zero, so requests with them are refused: %r",
                self._subject.name,
                error,
            )

    def _found(self, axes: Sequence[AxisSet]) -> EmptyAxes:
        subject, cache = self._subject, ProbeCache("empty-axes")
        attempts = {each: _attempts(subject, each) for each in axes}
        about = repr((_VERSION, onnxruntime.__version__, subject.settings, list(attempts.values())))
        digest = digest_of(subject.source, about)
        kept = _read(cache.find(digest), axes)
        if kept is not None:
            return kept
        verdicts, certain = self._tried(attempts)
        if certain:
            cache.keep(digest, [[sorted(each), reason] for each, reason in verdicts.items()])
        return EmptyAxes(verdicts)

    def _tried(self, attempts: Mapping[AxisSet, Sequence[ProbeRun]]) -> tuple[dict[AxisSet, str], bool]:
        """The verdicts, and whether another load would find the same."""
        verdicts = dict.fromkeys(attempts, _UNKNOWN)
        left = [(axes, attempt) for axes, some in attempts.items() for attempt in some]
        for _ in range(_MOST_CHILDREN):
            done, died_by = self._child_runs([attempt for _, attempt in left])
            if done is None:
                return verdicts, False
            for (axes, _), said in zip(left, done, strict=False):
                if said == ANSWERED:
                    verdicts[axes] = ""
                elif verdicts[axes]:
                    verdicts[axes] = _FAILED
            if len(done) == len(left):
                return verdicts, True
            fatal = left[len(done)][0]
            if died_by not in _CRASHES:
                verdicts.update({axes: _UNKNOWN for axes, _ in left[len(done) :]})
                return verdicts, False
            reason = _HUNG if died_by == signal.SIGALRM else _CRASHED
            verdicts.update({axes: reason for axes in attempts if fatal <= axes})
            left = [(axes, attempt) for axes, attempt in left[len(done) + 1 :] if not fatal <= axes]
            if not left:
                return verdicts, True
        verdicts.update({axes: _UNKNOWN for axes, _ in left})
        return verdicts, True

    def _child_runs(self, attempts: Sequence[ProbeRun]) -> tuple[list[str] | None, int]:
        """What a child said of each attempt until its end, and the signal that ended it (0: none).

        None instead where it could not even load the model.
        """
        subject = self._subject
        told = pickle.dumps(ProbeRuns(subject.path, subject.settings, subject.run_seconds, tuple(attempts)))
        with self._lock:
            if self._closed:
                return None, 0
            child = self._child = subprocess.Popen(
                [sys.executable, "-m", "tensorferry.server.model_checks.empty_axes_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # Ctrl-C at a terminal is not for the child.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        with child:
            try:
                output, _ = child.communicate(told, LOAD_SECONDS + subject.run_seconds * len(attempts))
            finally:
                child.kill()
        loaded, *said = output.decode().split() or [""]
        with self._lock:
            closed = self._closed
        if loaded != LOADED and not closed:
            _log.warning(
                "model %s: the process that tries it with axes of length zero could not load it on the CPU, so requests "
                "with them are refused",
                subject.name,
            )
        if loaded != LOADED:
            return None, 0
        return said, max(0, -child.returncode)


def _attempts(subject: ProbedModel, axes: AxisSet) -> list[ProbeRun]:
    """Runs with no element along these axes: of one row, of some and of a full batch, with other values."""
    most = subject.max_batch_size
    found = []
    for rows in sorted({1, min(3, most), most}) if most else [1]:
        if not rows:
            continue
        shapes = {}
        for spec in subject.io_mapping.signature.inputs:
            shape = [
                0
                if (spec.name, axis) in axes
                else dim
                if isinstance(dim, int)
                else rows
                if axis == 0
                else subject.size or 1
                for axis, dim in enumerate(spec.dims)
            ]
            # Strides of zero: of a large input no memory is made.
            given: Any = np.broadcast_to(np.uint8(0), tuple(shape))
            if spec.name in subject.io_mapping.inputs:
                given = subject.io_mapping.inputs[spec.name].to_model(given)
            shapes[spec.name] = given.shape
        found += [ProbeRun(shapes, zeros) for zeros in (False, True)]
    return found


def _read(kept: Any, axes: Sequence[AxisSet]) -> EmptyAxes | None:
    """A finding as it was kept; None where it is not one of these axes."""
    try:
        verdicts = {
            frozenset((str(name), int(axis)) for name, axis in each): str(reason) for each, reason in kept
        }
    except (TypeError, ValueError):
        return None
    return EmptyAxes(verdicts) if verdicts.keys() == set(axes) else None


def _words(axes: AxisSet) -> str:
    return " and ".join(f"axis {axis} of {name!r}" for name, axis in sorted(axes))
