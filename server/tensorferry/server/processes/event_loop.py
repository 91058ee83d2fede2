"""Event loop of the supervisor: children, their control channels, signals and times, on one thread."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress

from tensorferry.server.errors import StartError
from tensorferry.server.processes.child import SIGNALS, Child, ExitStatus
from tensorferry.server.processes.messages import MessageError
from tensorferry.server.processes.port import PortReservation
from tensorferry.server.processes.slot import ServerSlot
from tensorferry.server.processes.supervisor import Supervisor, SupervisorSettings
from tensorferry.server.system.scratch_directory import ScratchDirectory, remove_abandoned

_log = logging.getLogger("tensorferry.server")

# Time for killed children to end. One that hangs in a driver ends later.
_KILLED_SECONDS = 2.0
# The path of a Unix socket has at most 107 bytes; the socket's name is added.
_MAX_FOLDER_BYTES = 90


def run_supervisor(
    settings: SupervisorSettings, argv: Sequence[str], print_error: Callable[[str], None]
) -> int:
    """Run server processes until SIGTERM or Ctrl-C. Return the exit status.

    `argv` is what follows `tensorferry serve`; processes get it unchanged. StartError if the port cannot be listened on.
    Call it on the main thread; SIGTERM, SIGINT and SIGHUP are ignored afterwards.
    """
    remove_abandoned()
    with ExitStack() as stack:
        port = stack.enter_context(closing(PortReservation(settings.host, settings.port)))
        folder = _folder_of_sockets()
        stack.callback(folder.remove)
        where = {"address": port.address, "port": port.port, "folder": str(folder.path)}
        loop = stack.enter_context(closing(EventLoop(argv, settings)))
        with closing(Supervisor(settings, where, loop.launch, print_error)) as supervisor:
            return loop.run(supervisor)


class EventLoop:
    """Passes what children and operators do to the supervisor, one event after the other. Only for the main thread."""

    def __init__(self, argv: Sequence[str], settings: SupervisorSettings) -> None:
        self._argv = argv
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._children: dict[Child, ServerSlot] = {}
        # A pipe with the numbers of received signals, of operators and of processes that end.
        self._signals, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        # Not SIG_IGN for SIGCHLD: the kernel would discard how children end.
        for number in (*SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda received, frame: None)
        self._selector.register(self._signals, selectors.EVENT_READ)

    def close(self) -> None:
        """Kill the children that are left, and ignore the signals, so that none turns a clean exit into a death by one."""
        deadline = time.monotonic() + _KILLED_SECONDS
        for child in self._children:
            child.kill()
        for child in list(self._children):
            if child.wait(max(0.0, deadline - time.monotonic())):
                self._reap(child)
            else:
                child.abandon()
        self._selector.close()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.close(self._signals)
        os.close(self._writing)

    def launch(self, slot: ServerSlot) -> Child:
        """Start the process of a slot, and watch it. OSError if it cannot be started."""
        settings = self._settings
        inherited = [slot.page, *(each.fileno() for each in settings.sockets.values())]
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
                    for number in os.read(self._signals, 64):
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
                        child.channel.flush()
                    if events & selectors.EVENT_READ:
                        self._receive(supervisor, child)
            if time.monotonic() >= supervisor.next_time():
                supervisor.on_time()
        return supervisor.exit_status

    def _receive(self, supervisor: Supervisor, child: Child) -> bool:
        """Pass on what the child has sent. Return whether there may be more."""
        slot = self._children[child]
        try:
            is_open = child.channel.fill()
            messages = list(iter(child.channel.take, None))
        except BlockingIOError:
            return False
        except (OSError, MessageError) as error:
            self._selector.unregister(child.channel)
            supervisor.on_malformed(slot, str(error))
            return False
        for message in messages:
            supervisor.on_message(slot, message)
        if not is_open:
            self._selector.unregister(child.channel)
            supervisor.on_channel_closed(slot)
        return is_open

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

    def _reap(self, child: Child) -> ExitStatus:
        del self._children[child]
        self._selector.unregister(child.pidfd)
        if child.channel in self._selector.get_map():
            self._selector.unregister(child.channel)
        return child.reap()

    def _watch_unsent(self) -> None:
        """Wait for a channel to be writable if messages wait for that."""
        for child in self._children:
            key = self._selector.get_map().get(child.channel)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.channel.unsent else 0)
            if key is not None and key.events != events:
                self._selector.modify(child.channel, events, child)


def _folder_of_sockets() -> ScratchDirectory:
    """Return a new private folder. StartError if the path of a socket in it would be too long."""
    try:
        folder = ScratchDirectory()
    except OSError as error:
        reason = f"cannot create a folder for the sockets of the processes: {error}"
    else:
        if len(os.fsencode(folder.path)) <= _MAX_FOLDER_BYTES:
            return folder
        folder.remove()
        reason = f"the folder {folder.path.parent} has too long a path for a Unix socket"
    raise StartError(f"{reason}; choose another by TMPDIR")
