"""Write the modules of the client for threads that are generated from those of the asyncio client.

Both clients have the same modules in `aio/` and `threads/`. Only asyncio's sources say which calls
wait: with `await`, which this program removes. Modules of the same name that are written by hand
have what differs. The rules work on the text, so comments stay, and docstrings are converted too.
A block whose first line ends with the comment `asyncio only` is left out.

    python client/async_to_sync.py [--check]

With `--check` it writes nothing, and fails if a generated module differs from its output.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

CLIENT = Path(__file__).parent / "tensorferry" / "client"
MODULES = ("inference", "sequence", "server_calls", "shared_memory")
HEADER = "# Generated from {source} by `make client-threads`. Do not edit.\n"

# Replaced in this order, as regular expressions.
RULES = (
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bAsyncGenerator\[([^\[\]]+)\]", r"Generator[\1, None, None]"),
    (r"\bAsyncGenerator\b", "Generator"),
    (r"\bAsyncIterable\[[^\[\]]+\] \| ", ""),
    (r"\b__a(enter|exit)__\b", r"__\1__"),
    (r"\baclosing\b", "closing"),
    (r"\baclose\(\)", "close()"),
    (r"\banext\b", "next"),
    (r"\bimport asyncio\b", "import time"),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"\btensorferry\.client\.aio\b", "tensorferry.client.threads"),
    (r"\bthe asyncio client\b", "the client for threads"),
    (r"\bOne task at a time\b", "One thread at a time"),
)

# Passages of docstrings that begin a line, without line breaks and indentation.
PASSAGES = {
    "`requests` is a plain or an asynchronous iterable, and is iterated in a separate task.": (
        "`requests` is iterated on a separate thread, so state that it shares with the consumer needs a lock."
    ),
    "Nothing is sent before the first `anext()`. `aclose()` cancels the call and all its requests."
    " Leaving an `async for` early cancels them only when the iterator is garbage collected; use"
    " `contextlib.aclosing` to cancel them at once. One task at a time may use it.": (
        "Nothing is sent before the first `next()`. Closing or dropping the iterator cancels the call and all"
        " its requests. One thread at a time may use it."
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the generated modules, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description="Write the generated modules of the client for threads.")
    parser.add_argument("--check", action="store_true", help="fail if a module differs, and write nothing")
    check = parser.parse_args(arguments).check
    for name in MODULES:
        source, generated = CLIENT / "aio" / f"{name}.py", CLIENT / "threads" / f"{name}.py"
        header = HEADER.format(source=source.relative_to(CLIENT.parents[2]))
        text = formatted(header + converted(source.read_text()))
        if not check:
            generated.write_text(text)
        elif not generated.exists() or generated.read_text() != text:
            sys.exit(f"{generated} differs from what {source} gives: run `make client-threads`")


def converted(text: str) -> str:
    """Return the source for threads, not yet formatted."""
    text = without_await(without_marked_blocks(text))
    for passage, replacement in PASSAGES.items():
        lines = "\n        ".join(textwrap.wrap(replacement, 92))
        text = re.sub(r"\s+".join(map(re.escape, passage.split())), lines, text)
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text)
    return text


def without_marked_blocks(text: str) -> str:
    """Leave out lines that end with the comment, and the more indented lines that follow each."""
    kept: list[str] = []
    marked: int | None = None
    for line in text.splitlines(keepends=True):
        indent = len(line) - len(line.lstrip())
        if marked is not None and (indent > marked or not line.strip()):
            continue
        marked = indent if line.rstrip().endswith("# asyncio only") else None
        if marked is None:
            kept.append(line)
    return "".join(kept)


def without_await(text: str) -> str:
    """Remove each `await`, and parentheses that only grouped it with its call."""
    while (found := re.search(r"(?<![\w)\]])\(await |\bawait ", text)) is not None:
        begin, end = found.span()
        rest = text[end:]
        if found[0].startswith("("):
            close = closing_parenthesis(rest)
            rest = rest[:close] + rest[close + 1 :]
        text = text[:begin] + rest
    return text


def closing_parenthesis(text: str) -> int:
    """Return where the parenthesis ends that was opened before the text."""
    depth = 1
    for at, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if not depth:
            return at
    raise ValueError(f"no parenthesis closes before the end of {text[:80]!r}")


def formatted(text: str) -> str:
    """Return the module without unused imports, and with the format of this project."""
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--fix-only", "--quiet", "--select", "I,F401"], ["format", "--quiet"]):
        run = [*ruff, *command, "--stdin-filename", str(CLIENT / "threads" / "generated.py"), "-"]
        text = subprocess.run(run, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    main()
