"""Write docs/images/session.svg: a terminal session in which the digits model is served and called.

The commands are run, and what they print is drawn. `make recording` calls this.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "session.svg"
ADDRESS = "127.0.0.1:8001"
WIDTH = 108
SERVE = "tensorferry serve examples/digits/digits.onnx"
CALLS = (
    "tensorferry inspect examples/digits/digits.onnx --sizes 1,8,64 --latency-ms 1 --log-level warning",
    "tensorferry infer digits --input image=examples/digits/images.npy --output label",
)
# Of rich's own style sheet, which loads fonts from the network.
_FONTS = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)


def command(text: str) -> list[str]:
    """Return the arguments of a command that runs in this environment."""
    return [sys.executable, "-m", "tensorferry.server", *text.split()[1:]]


def record(console: Console, environment: Mapping[str, str]) -> None:
    """Serve the model, run the calls, and print all of it to the console."""

    def show(typed: str, printed: str) -> None:
        console.print(Text("$ " + typed, style="bold green"))
        # A command that installs from this checkout names its path.
        console.print(Text(printed.rstrip().replace(str(ROOT), ".")))

    server = subprocess.Popen(
        command(SERVE),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        lines: list[str] = []
        for line in server.stdout:
            lines.append(line)
            if " ready on " in line:
                break
        else:
            sys.exit(f"the server did not start:\n{''.join(lines)}")
        show(SERVE + " &", "".join(lines))
        for call in CALLS:
            done = subprocess.run(
                command(call), cwd=ROOT, env=environment, capture_output=True, text=True, check=True
            )
            show(call, done.stdout)
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    with open("/dev/null", "w") as nowhere, tempfile.TemporaryDirectory() as cache:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        # The verdicts are those of a first start.
        record(console, {**os.environ, "XDG_CACHE_HOME": cache})
    style = _FONTS.sub("", CONSOLE_SVG_FORMAT).replace("Fira Code", "Menlo, Consolas, DejaVu Sans Mono")
    console.save_svg(str(PICTURE), title="tensorferry", code_format=style, unique_id="session")
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
