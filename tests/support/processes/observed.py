"""What /proc shows of a server's processes: their ids, sockets, connections, memory, threads and open files."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

# States of a socket in /proc/net/tcp.
_ESTABLISHED, _LISTEN = "01", "0A"


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection of a client: the server's address, which each client has for itself, and the client's port."""

    address: str
    client_port: int
    process: int


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds: its proportional set size in bytes, its descriptors and its threads."""

    memory: int
    files: int
    threads: int


def children(parent: int) -> list[int]:
    """Return the children of a process's main thread, also those that are not reaped.

    So without what other threads have started and await, such as probes of a model, which may end at any moment.
    """
    return _children_of_thread(parent, parent)


def own_children() -> set[int]:
    """Return the children of all threads of this process.

    Compare two of them by subtraction, because other tests of the process may have children that live on, such as
    multiprocessing's resource tracker.
    """
    threads = map(int, os.listdir("/proc/self/task"))
    return {child for thread in threads for child in _children_of_thread(os.getpid(), thread)}


def _children_of_thread(process: int, thread: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        # It has ended. What it had started is now another thread's, if the process lives.
        return []


def of_module(parent: int, module: str) -> list[int]:
    """Return the children that run this module."""
    found = []
    for child in children(parent):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if module.encode() in words:
            found.append(child)
    return found


def with_argument(part: str) -> list[int]:
    """Return every process of the machine with this in its command line. Ids alone would not do: they are reused."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and part.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def listeners(port: int) -> int:
    """Return the number of sockets that listen on a port."""
    return sum(state == _LISTEN for _, _, state, _ in _sockets(port))


def connections(port: int, processes: Collection[int]) -> set[Connection]:
    """Return the open connections of these processes to clients of the port."""
    owners = {inode: process for process in processes for inode in _inodes(process)}
    return {
        Connection(address, client, owners[inode])
        for address, client, state, inode in _sockets(port)
        if state == _ESTABLISHED and inode in owners
    }


def held(process: int) -> Held:
    """Return what a process holds. FileNotFoundError or ProcessLookupError if it has ended."""
    home = f"/proc/{process}"
    for line in Path(f"{home}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            memory = int(line.split()[1]) << 10
            return Held(memory, len(os.listdir(f"{home}/fd")), len(os.listdir(f"{home}/task")))
    raise ProcessLookupError(process)


def in_dev_shm(process: int) -> list[str]:
    """Return the files in /dev/shm that a process has mapped."""
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return [line for line in lines if "/dev/shm/" in line]


def dev_shm_files() -> set[str]:
    """Return the names of all files in /dev/shm, but for semaphores of multiprocessing: no server uses that."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def left_in_dev_shm(before: set[str], patience: float = 30.0) -> list[str]:
    """Return the files in /dev/shm that are new and stay, although no process of any program has them mapped."""
    give_up = time.monotonic() + patience
    while (left := dev_shm_files() - before - _mapped_from_dev_shm()) and time.monotonic() < give_up:
        time.sleep(0.1)
    return [f"/dev/shm/{name} was left" for name in sorted(left)]


def _mapped_from_dev_shm() -> set[str]:
    mapped = [in_dev_shm(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {line.rpartition("/dev/shm/")[2] for lines in mapped for line in lines}


def _sockets(port: int) -> list[tuple[str, int, str, str]]:
    """Return address, remote port, state and inode of the sockets with this local port."""
    found = []
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except FileNotFoundError:
            continue
        for line in lines:
            words = line.split()
            address, _, local = words[1].partition(":")
            if int(local, 16) == port:
                found.append((_dotted(address), int(words[2].partition(":")[2], 16), words[3], words[9]))
    return found


def _dotted(address: str) -> str:
    """Return the IPv4 address, also one that is mapped into IPv6. The kernel writes it byte by byte from the end."""
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(address[-8:])))


def _inodes(process: int) -> Collection[str]:
    folder = f"/proc/{process}/fd"
    found: Mapping[str, None] = {}
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, PermissionError):
        return found
    inodes = []
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.append(target[8:-1])
    return inodes
