"""Mutation score of the test suite: small faults at random places of the product, and the share that tests find.

Each mutant changes one expression or statement of a copy of the repository: a comparison, a boolean, an operator, a
constant, a result, a call or a raise. The tests of its package then run until the first failure. Places are drawn
by the hash of their function and statement, so two trees with the same code get the same mutants.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
SERVER = "server/tensorferry/server/"
BATCHER = "batcher/tensorferry/batcher/"
DOORS = ("tests/wire/triton", "tests/wire/test_protocol_page.py", "tests/wire/shapes", "tests/e2e/failures")
# Folders of the product, and the tests that must find their faults: those of the package first.
PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "queue": (BATCHER + "queue", ("tests/batcher/queue", "tests/batcher")),
    "policy": (BATCHER + "policy", ("tests/batcher/policy", "tests/batcher")),
    "execution": (BATCHER + "execution", ("tests/batcher/execution", "tests/batcher")),
    "pipeline": (BATCHER + "pipeline", ("tests/batcher/pipeline", "tests/batcher")),
    "learning": (BATCHER + "learning", ("tests/batcher/learning", "tests/batcher")),
    "sequences": (BATCHER + "sequences", ("tests/batcher/sequences",)),
    "inference": (
        SERVER + "inference",
        (
            *("tests/server/inference", "tests/server/transport", *DOORS),
            *("tests/e2e/test_limits.py", "tests/wire/test_cuda_shared_memory.py"),
        ),
    ),
    "transport": (SERVER + "transport", ("tests/server/transport", *DOORS)),
    "models": (
        SERVER + "models",
        ("tests/server/models", "tests/wire/test_repository.py", "tests/e2e/models/test_remote_models.py"),
    ),
    "processes": (
        SERVER + "processes",
        ("tests/server/processes", "tests/crashes", "tests/e2e/test_processes.py"),
    ),
    "graph": (
        SERVER + "onnx/graph",
        ("tests/server/onnx/graph", "tests/server/onnx/batching", "tests/conformance/test_batching.py"),
    ),
    "client": ("client/tensorferry/client", ("tests/client",)),
    "security": (SERVER + "security", ("tests/server/security", "tests/e2e/test_security.py")),
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
LOGGING = {"debug", "info", "warning", "error", "exception", "critical"}
# Seconds of a mutant beyond four runs of its tests without a fault: it hangs.
GRACE = 60


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: the path of a file in the repository, its line, the changed text and the source with it."""

    path: str
    line: int
    before: str
    after: str
    source: str
    draw: str


def changed(node: ast.AST) -> ast.AST | None:
    """Return a copy of a node with one fault, or None if this kind of node gets none."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            new.ops = [COMPARISONS[type(operator)]()]
        case ast.BoolOp():
            new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            return new.operand
        case ast.BinOp() | ast.AugAssign() if type(new.op) in OPERATORS:
            new.op = OPERATORS[type(new.op)]()
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int(value)):
            new.value = value + 1
        case ast.Return(value=ast.expr()) if ast.unparse(new) != "return None":
            new.value = ast.Constant(None)
        case ast.Expr(value=ast.Call()) if not _logs(new.value):
            return ast.Pass()
        case ast.Raise(exc=ast.expr()):
            return ast.Pass()
        case _:
            return None
    return new


def _logs(call: ast.expr) -> bool:
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LOGGING


def _code(node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Yield the parents, fields and nodes of code that runs: no annotations, decorators, texts or type checking."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(
                child, ast.JoinedStr | ast.FunctionDef | ast.ClassDef
            ):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield node, field, child
            yield from _code(child)


def mutants(path: Path, relative: str) -> Iterator[Mutant]:
    """Yield all mutants of a file whose functions have a fault."""
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        count: dict[str, int] = {}
        for parent, field, node in list(_code(function)):
            new = changed(node)
            if new is None:
                continue
            before, after = ast.unparse(node), ast.unparse(new)
            whole = ast.unparse(parent) if not isinstance(parent, ast.FunctionDef | ast.ClassDef) else before
            key = f"{function.name} {whole} {before} {after}"
            count[key] = count.get(key, 0) + 1
            draw = hashlib.sha256(f"{key} {count[key]}".encode()).hexdigest()
            source = _with_fault(tree, parent, field, node, new)
            yield Mutant(relative, getattr(node, "lineno", function.lineno), before, after, source, draw)


def _with_fault(tree: ast.Module, parent: ast.AST, field: str, node: ast.AST, new: ast.AST) -> str:
    """Return the source of the module with another node in the place of one."""
    value = getattr(parent, field)
    replaced = [new if child is node else child for child in value] if isinstance(value, list) else new
    setattr(parent, field, replaced)
    try:
        return ast.unparse(ast.fix_missing_locations(tree))
    finally:
        setattr(parent, field, value)


def drawn(folder: str, count: int) -> list[Mutant]:
    """Return the first `count` mutants of a folder by their hashes, each place once."""
    found: dict[str, Mutant] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for mutant in mutants(path, str(path.relative_to(ROOT))):
            found.setdefault(mutant.draw, mutant)
    return [found[draw] for draw in sorted(found)[:count]]


def tests_of(mutant: Mutant, tests: Sequence[str]) -> list[str]:
    """Return the test files of a package, those first that name the changed module."""
    module = Path(mutant.path).with_suffix("").name
    files: dict[Path, bool] = {}
    for test in tests:
        path = ROOT / test
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            files.setdefault(file, f".{module} import" in file.read_text() or file.stem == f"test_{module}")
    ordered = sorted(files, key=lambda file: not files[file])
    return [str(file.relative_to(ROOT)) for file in ordered]


class Copies:
    """Copies of the repository in which mutants run, one for each thread."""

    def __init__(self, count: int, into: Path) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
        for number in range(count):
            directory = into / str(number)
            for name in files.stdout.splitlines():
                if (ROOT / name).is_file():
                    (directory / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, directory / name)
            (directory / ".venv").symlink_to(ROOT / ".venv")
            self._free.put(directory)

    def run(self, tests: Sequence[str], limit: float | None, mutant: Mutant | None = None) -> str | None:
        """Run tests, with a mutant or without, until the first failure; return its name, or None if all pass."""
        directory = self._free.get()
        paths = [str(directory / root) for root in ("batcher", "client", "protos", "server")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--timeout",
            "60",
            *tests,
        ]
        try:
            if mutant is not None:
                (directory / mutant.path).write_text(mutant.source)
            done = subprocess.run(
                command, cwd=directory, env=environment, timeout=limit, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return "took too long"
        finally:
            if mutant is not None:
                shutil.copy2(ROOT / mutant.path, directory / mutant.path)
            self._free.put(directory)
        if done.returncode == 0:
            return None
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return lines[0] if lines else (done.stdout.splitlines() or done.stderr.splitlines() or ["?"])[-1]


def score(name: str, count: int, copies: Copies, threads: ThreadPoolExecutor) -> str:
    """Return a row of the table: a package's mutants and the share found. Print each survivor."""
    folder, tests = PACKAGES[name]
    chosen = drawn(folder, count)
    began = time.monotonic()
    failure = copies.run(tests_of(chosen[0], tests), None)
    if failure is not None:
        raise SystemExit(f"{name}: the tests fail without a fault: {failure}")
    limit = 4 * (time.monotonic() - began) + GRACE
    results = threads.map(lambda mutant: copies.run(tests_of(mutant, tests), limit, mutant), chosen)
    found = 0
    for mutant, failure in zip(chosen, results, strict=True):
        found += failure is not None
        if failure is None:
            before, after = (text.splitlines()[0][:80] for text in (mutant.before, mutant.after))
            print(f"survived: {mutant.path}:{mutant.line}: {before}  ->  {after}", flush=True)
    return f"| {name} | {len(chosen)} | {found} | {found / len(chosen):.0%} |"


def main() -> None:
    """Print the mutation score of each package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PACKAGES), help="packages, separated by commas")
    parser.add_argument("--count", type=int, default=40, help="mutants of each package")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="mutants that run at once")
    arguments = parser.parse_args()
    rows = ["| package | mutants | found | score |", "|---|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as into, ThreadPoolExecutor(arguments.threads) as threads:
        copies = Copies(arguments.threads, Path(into))
        for name in arguments.only.split(","):
            rows.append(score(name, arguments.count, copies, threads))
            print(rows[-1], flush=True)
    print("\n" + "\n".join(rows))


if __name__ == "__main__":
    main()
