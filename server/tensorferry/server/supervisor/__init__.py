"""Parent process: starts, watches and replaces the engine and the front-ends. Needs only the standard library."""

from tensorferry.server.supervisor.child_process import ChildProcess
from tensorferry.server.supervisor.control import ControlError, Message
from tensorferry.server.supervisor.event_loop import run_supervisor
from tensorferry.server.supervisor.settings import SupervisorSettings

__all__ = ["ChildProcess", "ControlError", "Message", "SupervisorSettings", "run_supervisor"]
