"""The memory of large messages is reused, unless the user has configured the allocator."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
from support.processes.server import environment

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")

_PAGES_OF_A_BUFFER = (16 << 20) // 4096
_PROGRAM = """
import resource, threading
from tensorferry.server import malloc

malloc.reuse_large_buffers()


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        # A message, as many pieces and joined.
        b"".join([bytes(16 << 10) for _ in range(1 << 10)])
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


counts = []
for _ in range(3):
    thread = threading.Thread(target=faults)
    thread.start()
    thread.join()
print(counts[-1])
"""


def page_faults(**variables: str) -> int:
    kept = {
        name: value for name, value in environment().items() if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**kept, **variables},
        capture_output=True,
        check=True,
        timeout=60,
    )
    return int(ran.stdout)


def test_a_buffer_of_a_large_message_is_used_again() -> None:
    """On another thread too."""
    assert page_faults() < _PAGES_OF_A_BUFFER


def test_the_users_own_settings_are_kept() -> None:
    # Every buffer of this size is mapped for itself.
    assert page_faults(MALLOC_MMAP_THRESHOLD_="1048576") >= 8 * _PAGES_OF_A_BUFFER
