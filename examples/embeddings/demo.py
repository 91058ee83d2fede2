"""Serve the sentence encoder for a moment, send it plain sentences, and show how similar they are.

Run:  python demo.py [--device cpu|cuda]     after build.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tensorferry.client import InferenceClient

APP = Path(__file__).resolve().parent / "app.py"
QUESTION = "A man is eating food."
SENTENCES = [
    "A man is eating a piece of bread.",
    "A man is eating pasta.",
    "The girl is carrying a baby.",
    "A man is riding a horse.",
    "A woman is playing violin.",
    "Two men pushed carts through the woods.",
    "A monkey is playing drums.",
    "A cheetah is running behind its prey.",
]


@contextmanager
def served(device: str) -> Iterator[str]:
    """Start the server on a free port, and yield its address."""
    options = ["--port", "0", "--device", device, "--log-level", "warning"]
    command = [sys.executable, "-m", "tensorferry.server", "serve", str(APP), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        try:
            if not ready:
                sys.exit(process.wait() or 1)
            print(ready, end="")
            yield ready.split(" ready on ", 1)[1].split(": ", 1)[0]
        finally:
            process.terminate()


def show(address: str) -> None:
    """Send each sentence as its own request, and print them by their similarity to the question."""
    with InferenceClient(address) as client:
        futures = [
            client.submit("embed", {"text": np.array([sentence], object)})
            for sentence in (QUESTION, *SENTENCES)
        ]
        vectors = [future.result(timeout=30)["embedding"][0] for future in futures]
    scores = [float(vector @ vectors[0]) for vector in vectors[1:]]
    print(f"\nHow similar each sentence is to\n\n  {QUESTION}\n")
    for score, sentence in sorted(zip(scores, SENTENCES, strict=True), reverse=True):
        print(f"  {score:6.3f}  {sentence}")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the sentence encoder, and show its answers.")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    arguments = parser.parse_args()
    with served(arguments.device) as address:
        show(address)


if __name__ == "__main__":
    main()
