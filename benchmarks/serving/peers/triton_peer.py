"""Triton: the tritonserver binary of PyTriton's wheel, run directly, with its Python backend.

The wheel has no onnxruntime backend, so the model runs in a Python stub process behind Triton's C++
gRPC front-end and dynamic batcher. This program executes tritonserver.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytriton

from serving.peers.settings import (
    FOLDER,
    HOST,
    MAX_BATCH_SIZE,
    MODEL_NAME,
    MODEL_PATH,
    PORT,
    WINDOW_MS,
    Engine,
)

_DATATYPES = {"int64": "TYPE_INT64", "float32": "TYPE_FP32"}
_REPOSITORY = FOLDER / "repository"
BATCHING = f"""
instance_group [{{ kind: KIND_CPU count: 1 }}]
dynamic_batching {{ max_queue_delay_microseconds: {WINDOW_MS * 1000:.0f} }}
"""


def add_model(path: Path, name: str) -> None:
    """Add the model or function of a file, in Triton's Python backend."""
    engine = Engine(path)

    def width(shape: list[object]) -> object:
        return shape[1] if isinstance(shape[1], int) else -1

    add(
        name,
        f"""
backend: "python"
input [{{ name: "{engine.input.name}" data_type: {_DATATYPES[engine.dtype.name]} dims: {width(engine.input.shape)} }}]
output [{{ name: "{engine.output.name}" data_type: TYPE_FP32 dims: {width(engine.output.shape)} }}]
parameters [{{ key: "path" value: {{ string_value: "{path}" }} }}]
{BATCHING}
""",
        Path(__file__).with_name("triton_model.py"),
    )


def add(name: str, configuration: str, code: Path | None = None) -> None:
    """Add a model to the repository; `code` is the file of its Python."""
    model = _REPOSITORY / name
    (model / "1").mkdir(parents=True)
    if code is not None:
        shutil.copy(code, model / "1" / "model.py")
    (model / "config.pbtxt").write_text(f'name: "{name}"\nmax_batch_size: {MAX_BATCH_SIZE}\n{configuration}')


def serve() -> None:
    """Write the backends, and execute the server with the repository."""
    triton = Path(pytriton.__file__).with_name("tritonserver")
    backends = FOLDER / "backends"
    shutil.copytree(triton / "backends", backends)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = backends / "python" / "triton_python_backend_stub"
    shutil.copy(triton / "python_backend_stubs" / version / stub.name, stub)
    stub.chmod(0o755)
    libraries = Path(pytriton.__file__).parents[1] / "nvidia_pytriton.libs"
    # The stub must load libpython of this interpreter, because it uses its standard library.
    os.environ["LD_LIBRARY_PATH"] = f"{sys.base_prefix}/lib:{libraries}"
    # The stub ignores PYTHONPATH; triton_model.py reads this variable.
    os.environ["SERVING_BENCH_PATHS"] = os.pathsep.join(sys.path)
    options = {
        "model-repository": _REPOSITORY, "backend-directory": backends, "grpc-address": HOST,
        "grpc-port": PORT, "http-address": HOST, "http-port": PORT + 1, "allow-metrics": "false",
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in options.items()]
    os.execv(triton / "bin" / "tritonserver", ["tritonserver", *words])


if __name__ == "__main__":
    add_model(MODEL_PATH, MODEL_NAME)
    serve()
