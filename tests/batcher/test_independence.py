"""The batcher is a library of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import GenericAlias

import tensorferry.batcher

SCRIPT = """
import json, sys
before = set(sys.modules)
sys.path.insert(0, sys.argv[1])
import tensorferry.batcher.testing
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def test_importing_it_imports_numpy_and_the_standard_library_alone() -> None:
    root = Path(tensorferry.batcher.__file__).parents[2]
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root)], capture_output=True, text=True, check=True, timeout=60
    )
    imported = {name for name in json.loads(answer.stdout) if name not in sys.stdlib_module_names}
    assert imported == {"numpy", "tensorferry"}


def test_everything_public_is_there_and_has_a_docstring() -> None:
    for name in tensorferry.batcher.__all__:
        public = getattr(tensorferry.batcher, name)
        # An alias of a type has a comment instead.
        assert public.__doc__ or isinstance(public, GenericAlias), name
