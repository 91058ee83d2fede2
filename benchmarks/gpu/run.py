"""`make gpu-bench`: the server's use of the device, beside a bare loop, in a closed and an open loop.

    python -m gpu.run --load PROGRAM [--only bert|resnet] [--quick] [--seconds 540] [--device cuda:0] [--results FILE]

On a GPU: BERT-base and ResNet-50 in FP16. Elsewhere, and with --quick: small models of the same
form on the CPU, which test the harness and say nothing about a GPU. Parts may be run one after the
other (--only): each replaces its own results in the file, and all results are reported together.
Each keeps to its --seconds by leaving measurements out, and saves its results repeatedly, so that
an interrupted run is not lost.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from gpu import part as measuring
from gpu.cores import Layout
from gpu.report import DOCS, report, write
from gpu.workloads import workload_of
from serving.machine import processor
from serving.run import cache_folder, save
from tensorferry.server.errors import StartError
from tensorferry.server.runtime.devices import choose_device, pci_bus_id
from tensorferry.server.runtime.ort import onnxruntime

NAMES = ("bert", "resnet")
NO_GPU = "not measured on a GPU"
_ASK_SECONDS = 20
UNFINISHED = "it was ended from outside"


def main() -> None:
    """Measure, report, and save the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", type=Path, required=True, help="the load generator, built by make")
    parser.add_argument("--only", choices=NAMES, help="one of the two parts")
    parser.add_argument("--quick", action="store_true", help="the CPU's small models, a minute in all")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--seconds", type=float, help="for each part (default: 540 on a GPU, else none)")
    parser.add_argument("--results", type=Path, help="(default: in the cache, by device)")
    parser.add_argument(
        "--docs", action="store_true", help="write the report into docs/results/performance.md"
    )
    arguments = parser.parse_args()
    # Like Ctrl-C, because the servers are separate processes that must be ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(_run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    device, why = _device("cpu" if arguments.quick else arguments.device)
    small = device == "cpu"
    if small:
        print(f"gpu-bench: {NO_GPU}: {why}. Small models on the CPU instead.", flush=True)
    cache = cache_folder()
    kind = "quick" if arguments.quick else "cpu" if small else "gpu"
    path: Path = arguments.results or cache / "results" / f"gpu-bench-{kind}.json"
    results: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() and arguments.only else {"parts": {}}
    )
    cores = len(os.sched_getaffinity(0))
    layout = Layout.here()
    os.sched_setaffinity(0, {layout.load})
    plan = measuring.QUICK if arguments.quick else measuring.ON_CPU if small else measuring.ON_GPU
    if arguments.seconds is not None:
        plan = replace(plan, seconds=arguments.seconds)
    failed = 0
    for name in [arguments.only] if arguments.only else NAMES:
        described = {
            "date": datetime.date.today().isoformat(), "command": _command(arguments, name),
            "device": _device_name(device), "small": small, "layout": str(layout),
            "machine": _machine(cores), "workload": name,
        }  # fmt: skip

        def say(words: str) -> None:
            print(f"gpu-bench: {words}", flush=True)

        part = measuring.Part(
            workload_of(name, small=small), plan, device, layout, arguments.load.resolve(), say
        )
        part.results["failure"] = UNFINISHED

        def keep(part: measuring.Part = part, described: Mapping[str, Any] = described) -> None:
            results["parts"][described["workload"]] = {**described, **part.results}
            save(results, path)

        part.keep = keep
        with tempfile.TemporaryDirectory(prefix="tf-") as folder:
            try:
                part.run(cache, Path(folder))
                del part.results["failure"]
            except Exception as error:
                # Results so far are kept, and marked as incomplete.
                part.results["failure"] = f"{type(error).__name__}: {error}"
                say(f"{name} FAILED: {part.results['failure']}")
                failed = 1
            finally:
                keep()
    text = report(results)
    print(f"\n{text}\n\nresults: {path}")
    if arguments.docs:
        write(DOCS, text)
    if small:
        print(f"gpu-bench: {NO_GPU}")
    return failed


def _device(wanted: str) -> tuple[str, str]:
    """Return the device, and the reason if it is not a GPU."""
    if wanted == "cpu":
        return "cpu", "the CPU was asked for"
    try:
        return choose_device("cuda" if wanted == "auto" else wanted), ""
    except StartError as error:
        if wanted != "auto":
            sys.exit(f"gpu-bench: {error}")
        return "cpu", str(error)


def _device_name(device: str) -> str:
    if device == "cpu":
        return "CPU"
    # NVML's numbering differs from CUDA's, which follows CUDA_VISIBLE_DEVICES.
    place = pci_bus_id(int(device.partition(":")[2])) or ""
    words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", f"--id={place}"]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return device
    return (asked.stdout.strip() if not asked.returncode else "") or device


def _machine(cores: int) -> dict[str, Any]:
    return {
        "processor": processor(Path("/proc/cpuinfo").read_text()),
        "cores": cores,
        "python": platform.python_version(),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    """Return installed versions; of ONNX Runtime the imported build, because another may be installed beside."""
    built = import_module("onnxruntime.capi.build_and_package_info")
    cuda = getattr(built, "cuda_version", "")
    found = {built.package_name: onnxruntime.__version__ + (f" (CUDA {cuda})" if cuda else "")}
    return found | {name: metadata.version(name) for name in ("onnx", "grpcio", "protobuf", "numpy")}


def _command(arguments: argparse.Namespace, name: str) -> str:
    words = ["make gpu-bench"]
    if arguments.quick:
        words.append("QUICK=1")
    if arguments.only:
        words.append(f"ONLY={name}")
    if arguments.seconds is not None:
        words.append(f"SECONDS={arguments.seconds:g}")
    return " ".join(words)


if __name__ == "__main__":
    main()
