"""Child process that runs a model with axes of length zero. ONNX Runtime may crash it; if it hangs, it is killed."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tensorferry.server.runtime.ort_options import OrtOptions

# Time limit for loading the model.
LOAD_SECONDS = 120

LOADED, ANSWERED, FAILED = "loaded", "answered", "failed"


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """A run with inputs of these shapes, with random values or with zeros."""

    shapes: Mapping[str, tuple[int, ...]]
    zeros: bool


@dataclass(frozen=True, slots=True)
class ProbeRuns:
    """Input that the process reads from its standard input. `run_seconds` limits one run."""

    path: Path
    ort_options: OrtOptions
    run_seconds: int
    runs: tuple[ProbeRun, ...]


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Requests to models that serve come first.
    os.nice(19)
    # The default action of the signal ends the process even while native code runs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LOAD_SECONDS)
    import numpy as np

    from tensorferry.server.runtime.sampling import random_array
    from tensorferry.server.runtime.session import Session

    request: ProbeRuns = pickle.load(sys.stdin.buffer)
    session = Session(request.path, "cpu", request.ort_options)
    print(LOADED, flush=True)
    for run in request.runs:
        signal.alarm(request.run_seconds)
        generator = np.random.default_rng(0)
        inputs = {}
        for spec in session.signature.inputs:
            array = random_array(spec, run.shapes[spec.name], generator)
            if run.zeros and spec.datatype.size:
                array = np.zeros_like(array)
            inputs[spec.name] = array
        try:
            session.run(inputs)
        except Exception:
            print(FAILED, flush=True)
        else:
            print(ANSWERED, flush=True)
    signal.alarm(0)


if __name__ == "__main__":
    _main()
