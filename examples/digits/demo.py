"""Start the server with the digits model, send it real images, and draw its answers.

    python examples/digits/demo.py [--port 8001] [--device cpu|cuda] [--once]

The server runs until Ctrl-C, or until the answers with --once.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tensorferry.client import InferenceClient, InferenceResult

HERE = Path(__file__).resolve().parent
SHADES = " .:-=+*%@"
PICTURES = 12
ACROSS = 6


def start_server(port: int, device: str) -> tuple[subprocess.Popen[str], str, str]:
    """Return the server's process, its address, and its readiness line."""
    model = f"digits={HERE / 'digits.onnx'}"
    options = ["--port", str(port), "--device", device, "--log-level", "warning"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorferry.server", "serve", model, *options],
        stdout=subprocess.PIPE,
        text=True,
        # Only this process gets Ctrl-C; it then signals the server once.
        start_new_session=True,
    )
    assert process.stdout is not None
    ready = process.stdout.readline().strip()
    if not ready:
        sys.exit(process.wait() or 1)
    return process, ready.split(" ready on ", 1)[1].split(": ", 1)[0], ready


def draw(images: npt.NDArray[np.uint8], captions: list[list[str]]) -> str:
    """Draw the images side by side, with their captions below."""
    width = 2 * images.shape[2]
    lines = [
        "  ".join("".join(SHADES[pixel // 2] * 2 for pixel in row) for row in rows)
        for rows in zip(*images, strict=True)
    ]
    for texts in zip(*captions, strict=True):
        lines.append("  ".join(text.center(width)[:width] for text in texts).rstrip())
    return "\n".join("  " + line.rstrip() for line in lines)


def caption(result: InferenceResult, truth: int, milliseconds: float) -> list[str]:
    """Return the label with its score, the batch of the request, and the time."""
    label = int(result["label"][0])
    sure = float(result["probabilities"][0, label])
    mark = "" if label == truth else f", was {truth}"
    batch, rows = result.parameters["batch_number"], result.parameters["batch_rows"]
    return [
        f"{label} ({sure:.0%}{mark})",
        f"batch {batch}: {rows} row{'s' * (rows != 1)}",
        f"{milliseconds:.1f} ms",
    ]


def show(address: str) -> None:
    """Send single images concurrently, each as its own request, and print the answers."""
    heldout = np.load(HERE / "heldout.npz")
    chosen = np.random.default_rng().choice(len(heldout["images"]), PICTURES, replace=False)
    images, labels = heldout["images"][chosen], heldout["labels"][chosen]
    print(f"\n{PICTURES} handwritten digits the model has never seen, each sent as one request:\n")
    took: dict[int, float] = {}

    def note(index: int, sent: float, _: Future[InferenceResult]) -> None:
        took[index] = 1e3 * (time.perf_counter() - sent)

    with InferenceClient(address) as client:
        client.infer("digits", {"image": images[:1]})
        futures = []
        for index, image in enumerate(images):
            sent = time.perf_counter()
            future = client.submit("digits", {"image": image[None]}, parameters={"explain": True})
            future.add_done_callback(partial(note, index, sent))
            futures.append(future)
        results = [future.result(timeout=30) for future in futures]
    captions = [caption(result, int(labels[i]), took[i]) for i, result in enumerate(results)]
    for start in range(0, PICTURES, ACROSS):
        print(draw(images[start : start + ACROSS], captions[start : start + ACROSS]), end="\n\n")
    right = sum(int(result["label"][0]) == truth for result, truth in zip(results, labels, strict=True))
    batches = len({result.parameters["batch_number"] for result in results})
    ran = "1 batch" if batches == 1 else f"{batches} batches"
    print(f"{right} of {PICTURES} right; the {PICTURES} requests ran in {ran}.\n")


def show_next_steps(address: str) -> None:
    """Print commands to try next, in the shell and in Python."""
    eight = np.load(HERE / "heldout.npz")["images"][0]
    pixels = ",".join(map(str, eight.reshape(-1).tolist()))
    print(f"""Try next, from another shell:

  grpcurl -plaintext {address} list
  grpcurl -plaintext {address} describe inference.GRPCInferenceService
  grpcurl -plaintext -d '{{"model_name": "digits", "inputs": [{{"name": "image", "datatype": "UINT8",
    "shape": [1, 8, 8], "contents": {{"uint_contents": [{pixels}]}}}}]}}' \\
    {address} inference.GRPCInferenceService/ModelInfer
  .venv/bin/tensorferry describe digits --target {address}

and in .venv/bin/python:

  import numpy as np
  from tensorferry.client import InferenceClient
  images = np.load("examples/digits/heldout.npz")["images"]
  with InferenceClient("{address}") as client:
      print(client.infer("digits", {{"image": images[:5]}})["label"])
""")


def main() -> int:
    """Run the demo; return the server's exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8001, help="port to serve on, 0 for any (default: 8001)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--once", action="store_true", help="stop after the answers")
    arguments = parser.parse_args()
    process, address, ready = start_server(arguments.port, arguments.device)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(ready)
        show(address)
        if not arguments.once:
            show_next_steps(address)
            print(f"Serving on {address} until Ctrl-C ...", flush=True)
            return process.wait()
    except KeyboardInterrupt:
        print("\nstopping ...")
    finally:
        if process.poll() is None:
            process.terminate()
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
