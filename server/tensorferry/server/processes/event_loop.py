"""Event loop of the supervisor: children, their control channels, signals and times, on one thread."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from tensorferry.server.errors import StartError
from tensorferry.server.processes.child import Child, Ending
from tensorferry.server.processes.control import ControlError
from tensorferry.server.processes.port import PortReservation
from tensorferry.server.processes.settings import Environment, SupervisorSettings
from tensorferry.server.processes.slot import ServerSlot
from tensorferry.server.processes.supervisor import Supervisor
from tensorferry.server.scratch_directory import ScratchDirectory, remove_abandoned

_log = logging.getLogger("tensorferry.server")

# Time for killed children to end. One that hangs in a driver ends later.
_KILLED_SECONDS = 2.0
# The path of a Unix socket has at most 107 bytes; the socket's name is added.
_MAX_FOLDER_BYTES = 90

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_supervisor(
    settings: SupervisorSettings, argv: Sequence[str], print_error: Callable[[str], None]
) -> int:
    """Run server processes until SIGTERM or Ctrl-C. Return the exit status.

    `argv` is what follows `tensorferry serve`; processes get it unchanged. StartError if the port cannot be listened on.
    Call it on the main thread; SIGTERM, SIGINT and SIGHUP are ignored afterwards.
    """
    remove_abandoned()
    port = PortReservation(settings.host, settings.port)
    folder: ScratchDirectory | None = None
    supervisor: Supervisor | None = None
    try:
        folder = _folder_of_sockets()
        with EventLoop(argv, settings) as loop:
            environment = Environment(clock=time.monotonic, launch=loop.launch, print_error=print_error)
            supervisor = Supervisor(settings, environment, port.address, port.port, folder.path)
            return loop.run(supervisor)
    finally:
        if supervisor is not None:
            supervisor.close()
        if folder is not None:
            folder.remove()
        port.close()


class EventLoop:
    """Passes what children and operators do to the supervisor, one event after the other.

    At the end of the context, children that are left are killed, and the signals are ignored, so that a late one cannot turn
    a clean exit into a death by signal.
    """

    def __init__(self, argv: Sequence[str], settings: SupervisorSettings) -> None:
        self._argv = argv
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._children: dict[Child, ServerSlot] = {}
        self._signals = _SignalPipe()
        self._selector.register(self._signals, selectors.EVENT_READ)

    def __enter__(self) -> EventLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + _KILLED_SECONDS
        for child in self._children:
            child.kill()
        for child in list(self._children):
            if child.wait(max(0.0, deadline - time.monotonic())):
                self._reap(child)
        self._selector.close()
        self._signals.close()

    def launch(self, slot: ServerSlot) -> Child:
        """Start the process of a slot, and watch it. OSError if it cannot be started."""
        settings = self._settings
        inherited = [slot.page] + ([] if settings.metrics_fd is None else [settings.metrics_fd])
        variables = {"CUDA_VISIBLE_DEVICES": settings.gpus[slot.index]} if settings.gpus else {}
        child = Child(settings.module, self._argv, inherited=inherited, variables=variables)
        self._children[child] = slot
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(child.channel, selectors.EVENT_READ, child)
        return child

    def run(self, supervisor: Supervisor) -> int:
        """Run until the supervisor has an exit status, and return that."""
        try:
            return self._run(supervisor)
        except BaseException as error:
            _log.critical("the supervisor crashed (bug): it kills every process and exits", exc_info=error)
            return 1

    def _run(self, supervisor: Supervisor) -> int:
        supervisor.start()
        while supervisor.exit_status is None:
            self._watch_unsent()
            timeout = max(0.0, supervisor.next_time() - time.monotonic())
            for key, events in self._selector.select(timeout):
                child = key.data
                if child is None:
                    for number in self._signals.read():
                        if number == signal.SIGCHLD:
                            self._reap_orphans()
                        else:
                            supervisor.on_signal(number)
                elif child not in self._children:
                    # It ended by an earlier event.
                    continue
                elif key.fd == child.pidfd:
                    self._end(supervisor, child)
                else:
                    if events & selectors.EVENT_WRITE:
                        child.flush()
                    if events & selectors.EVENT_READ:
                        self._receive(supervisor, child)
            if time.monotonic() >= supervisor.next_time():
                supervisor.on_time()
        return supervisor.exit_status

    def _receive(self, supervisor: Supervisor, child: Child) -> bool:
        """Pass the next message on. Return whether there was one."""
        slot = self._children[child]
        try:
            message = child.receive()
        except BlockingIOError:
            return False
        except (OSError, ControlError) as error:
            supervisor.on_malformed(slot, str(error))
            self._unregister_channel(child)
            return False
        if message is None:
            self._unregister_channel(child)
            supervisor.on_channel_closed(slot)
            return False
        supervisor.on_message(slot, message)
        return True

    def _end(self, supervisor: Supervisor, child: Child) -> None:
        slot = self._children[child]
        # Why it has ended can be in its last message.
        while child.channel in self._selector.get_map() and self._receive(supervisor, child):
            pass
        supervisor.on_end(slot, self._reap(child))
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        """Reap processes whose parent has ended. The kernel makes them children of this process if it is process 1.

        A child of this class that has ended is left for its own event, which calls this again.
        """
        children = {child.pid for child in self._children}
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, options)) is not None and ended.si_pid not in children:
                os.waitpid(ended.si_pid, os.WNOHANG)

    def _reap(self, child: Child) -> Ending:
        del self._children[child]
        self._selector.unregister(child.pidfd)
        self._unregister_channel(child)
        return child.reap()

    def _unregister_channel(self, child: Child) -> None:
        if child.channel in self._selector.get_map():
            self._selector.unregister(child.channel)

    def _watch_unsent(self) -> None:
        """Wait for a channel to be writable if messages wait for that."""
        for child in self._children:
            key = self._selector.get_map().get(child.channel)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.has_unsent else 0)
            if key is not None and key.events != events:
                self._selector.modify(child.channel, events, child)


class _SignalPipe:
    """Pipe with the numbers of received signals, of operators and of processes that end. Only for the main thread."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        # Not SIG_IGN for SIGCHLD: the kernel would discard how children end.
        for number in (*_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda received, frame: None)

    def fileno(self) -> int:
        return self._reading

    def read(self) -> Sequence[int]:
        try:
            received = os.read(self._reading, 64)
        except BlockingIOError:
            return []
        return [number for number in received if number in (*_SIGNALS, signal.SIGCHLD)]

    def close(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.close(self._reading)
        os.close(self._writing)


def _folder_of_sockets() -> ScratchDirectory:
    """Return a new private folder. StartError if the path of a socket in it would be too long."""
    try:
        folder = ScratchDirectory()
    except OSError as error:
        raise StartError(
            f"cannot create a folder for the sockets of the processes: {error}; choose another by TMPDIR"
        ) from None
    if len(os.fsencode(folder.path)) > _MAX_FOLDER_BYTES:
        folder.remove()
        raise StartError(
            f"the folder {folder.path.parent} has too long a path for a Unix socket; choose another by TMPDIR"
        )
    return folder
