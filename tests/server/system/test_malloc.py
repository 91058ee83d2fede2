"""The memory of large messages is reused, unless the user has configured the allocator."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
from support.processes.server import environment

from tensorferry.server.system import malloc

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")

_PAGES_OF_A_BUFFER = (16 << 20) // 4096
_PROGRAM = """
import resource, threading
from tensorferry.server.system import malloc

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


def printed(program: str, **variables: str) -> list[int]:
    """Return the numbers that a program prints."""
    kept = {
        name: value for name, value in environment().items() if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    command, env = [sys.executable, "-c", program], {**kept, **variables}
    ran = subprocess.run(command, env=env, capture_output=True, check=True, timeout=60)
    return [int(word) for word in ran.stdout.split()]


def test_a_buffer_of_a_large_message_is_used_again() -> None:
    """On another thread too."""
    (faults,) = printed(_PROGRAM)
    assert faults < _PAGES_OF_A_BUFFER


def test_the_users_own_settings_are_kept() -> None:
    # Every buffer of this size is mapped for itself.
    (faults,) = printed(_PROGRAM, MALLOC_MMAP_THRESHOLD_="1048576")
    assert faults >= 8 * _PAGES_OF_A_BUFFER


_BURST = """
from pathlib import Path
from tensorferry.server.system import malloc

malloc.reuse_large_buffers()
unused = malloc.UnusedMemory()


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


burst = [b"x" * (1 << 20) for _ in range(300)]
# It lies behind the burst, so glibc cannot shorten its heap.
behind = b"x" * (64 << 10)
del burst
readings = [resident()]
for now in (0.0, 10.0, 20.0):
    unused.check(now)
    readings.append(resident())
print(*readings)
"""


def test_the_memory_of_a_burst_is_given_back_when_it_was_not_needed_for_a_while() -> None:
    *before, after = printed(_BURST)
    assert min(before) > 300
    assert after < 100


def test_memory_that_is_needed_at_times_is_kept() -> None:
    free, given_back = [1 << 30], list[int]()
    unused = malloc.UnusedMemory(lambda: free[0], lambda: given_back.append(free[0]))
    for second in range(0, 300, 5):
        # A large message each 15 seconds.
        free[0] = 64 << 20 if second % 15 == 0 else 1 << 30
        assert unused.check(float(second)) == second + 5
    assert given_back == []
    free[0] = 1 << 30
    for second in range(300, 365, 5):
        unused.check(float(second))
    assert set(given_back) == {1 << 30}
