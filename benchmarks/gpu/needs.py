"""Requirements of this benchmark, checked before anything starts."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tomllib
from collections.abc import Iterable
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

_ROOT = Path(__file__).resolve().parents[2]
_OURS = ("protos", "batcher", "server", "client")

# The package of each module.
MODULES = {
    "mlperf_loadgen": "mlcommons-loadgen", "onnx": "onnx",
    "onnxruntime": "onnxruntime-gpu[cuda,cudnn], or onnxruntime for the CPU", "numpy": "numpy",
    "grpc": "grpcio", "google.protobuf": "protobuf", "prometheus_client": "prometheus-client",
}  # fmt: skip
_VERSIONS = ("mlcommons-loadgen", "onnx", "grpcio", "protobuf", "numpy")


def use_this_checkout() -> None:
    """Make the benchmarks importable, here and in child processes; and the checkout if nothing is
    installed.
    """
    benchmarks = _ROOT / "benchmarks"
    folders = [benchmarks, benchmarks / "simulate"]
    if not _there("tensorferry.server"):
        folders += [*(_ROOT / name for name in _OURS), _version_folder()]
    found = [str(folder) for folder in folders]
    sys.path[:0] = found
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*found, *([inherited] if inherited else [])])


def _version_folder() -> Path:
    """Create a folder that states the checkout's version like an installation, because the server asks
    for it.
    """
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    folder = Path(mkdtemp(prefix="tf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    metadata = folder / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir()
    lines = ("Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}", "")
    (metadata / "METADATA").write_text("\n".join(lines))
    return folder


def missing(modules: Iterable[str] = MODULES) -> list[str]:
    """Return the modules that cannot be imported here, with their packages."""
    return [f"{module} ({MODULES[module]})" for module in modules if not _there(module)]


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def versions() -> dict[str, str]:
    """Return installed versions; of ONNX Runtime the imported one, because another build may be
    installed beside.
    """
    from tensorferry.server.runtime.ort import onnxruntime

    built = import_module("onnxruntime.capi.build_and_package_info")
    cuda = getattr(built, "cuda_version", "")
    found = {built.package_name: onnxruntime.__version__ + (f" (CUDA {cuda})" if cuda else "")}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
