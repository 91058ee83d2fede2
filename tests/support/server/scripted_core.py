"""grpc's core as the lane sees it, scripted: calls whose events come in any order that core allows.

Threads are a `Interleaver`'s: one runs at a time, and another may go on at every lock of the lane and at
every operation that it starts. The test fails where core would abort the process.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from support.batcher.interleave import Interleaver, Lock

from tensorferry.server.status import Status
from tensorferry.server.transport import stream_registry
from tensorferry.server.transport.lane import cygrpc, lane, stream
from tensorferry.server.transport.lane.lane import Lane

Tag = Callable[[Any], None]


@dataclass
class Operation:
    """One operation of a batch; later, its result."""

    kind: str
    content: Any = None
    gone: bool = False

    def message(self) -> bytes | None:
        received: bytes | None = self.content
        return received

    def cancelled(self) -> bool:
        return self.gone


@dataclass
class Batch:
    operations: tuple[Operation, ...]
    tag: Tag


class Core:
    """Core's calls and the events that wait for the polling thread, which takes them in any order."""

    def __init__(self, interleaver: Interleaver, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.interleaver = interleaver
        self.random = random.Random(seed)
        self.events: list[tuple[Tag, Any]] = []
        self.calls: list[WireCall] = []
        for module in (lane, stream, stream_registry):
            monkeypatch.setattr(module, "threading", SimpleNamespace(Lock=lambda: Lock(interleaver)))
        self.queue = SimpleNamespace(next_wakeup=0.0, idle=True, configure=lambda *callbacks: None)
        self.now = 0.0
        server = SimpleNamespace(queue=self.queue, register=lambda method: None, request=list.clear)
        monkeypatch.setattr(cygrpc, "Server", lambda public: server)
        for name, kind in (("ReceiveMessage", "receive"), ("ReceiveCloseOnServer", "close")):
            monkeypatch.setattr(cygrpc, f"{name}Operation", lambda flags, kind=kind: Operation(kind))
        monkeypatch.setattr(
            cygrpc,
            "SendMessageOperation",
            lambda data, flags: Operation("collected" if flags else "message", bytes(data)),
        )
        monkeypatch.setattr(cygrpc, "SEND_INITIAL_METADATA", Operation("metadata"))
        monkeypatch.setattr(cygrpc, "IGNORE_CLOSE", Operation("close"))
        monkeypatch.setattr(cygrpc, "SEND_OK", Operation("status", Status(grpc.StatusCode.OK, "")))
        monkeypatch.setattr(
            cygrpc, "send_final_status", lambda ending: Operation("status", _status_of(ending))
        )

    def pause(self) -> None:
        """Let another thread continue here."""
        self.interleaver.wait(lambda: True)

    def arrive(self, tag: Tag, metadata: tuple[tuple[str, str], ...] = ()) -> WireCall:
        """Add the event of a new call."""
        call = WireCall(self)
        self.calls.append(call)
        details = SimpleNamespace(deadline=float("inf"))
        event = SimpleNamespace(
            success=True, call=call, call_details=details, invocation_metadata=metadata, batch_operations=()
        )
        self.events.append((tag, event))
        return call

    def poll(self, lane: Lane, over: Callable[[], bool]) -> None:
        """Handle events until everything is over and no event is left; sometimes let calls wait long."""
        queue = self.queue
        while True:
            self.interleaver.wait(lambda: bool(self.events) or queue.next_wakeup < math.inf or over())
            if queue.next_wakeup < math.inf and (not self.events or self.random.random() < 0.1):
                self.now = max(self.now, queue.next_wakeup)
                queue.next_wakeup = lane._on_wakeup(self.now)
            elif self.events:
                tag, event = self.events.pop(self.random.randrange(len(self.events)))
                tag(event)
                del tag, event
            else:
                return


def _status_of(ending: cygrpc.FinalStatus) -> Status:
    code = next(code for code in grpc.StatusCode if code.value[0] == ending.code)
    return Status(code, ending.message.decode())


@dataclass(eq=False)
class WireCall:
    """One call: the client's messages, the server's operations, and their results."""

    core: Core
    sent: deque[bytes] = field(default_factory=deque)
    half_closed: bool = False
    cancelled: bool = False
    got: list[bytes] = field(default_factory=list)
    # Sent messages that wait for the one that follows them.
    collected: list[bytes] = field(default_factory=list)
    status: Status | None = None
    closed: bool = False
    _pending: dict[str, Batch] = field(default_factory=dict)
    _begun: bool = False
    _status_started: bool = False
    _close_asked: bool = False

    @property
    def over(self) -> bool:
        """Whether neither side can send any more."""
        return self.cancelled or self.status is not None

    @property
    def sending(self) -> bool:
        """Whether a send of the server is outstanding."""
        return "send" in self._pending

    def peer(self) -> bytes:
        return b"ipv4:192.0.2.1:1"

    def start_server_batch(self, operations: tuple[Operation, ...], tag: Tag) -> None:
        self.core.pause()
        kinds = [operation.kind for operation in operations]
        # Operations without contents are shared: each batch has its own.
        batch = Batch(tuple([Operation(o.kind, o.content) for o in operations]), tag)
        for kind, other in (
            ("receive", "receive"),
            ("close", "close"),
            ("message", "send"),
            ("status", "send"),
        ):
            assert kind not in kinds or other not in self._pending, f"a second {kind} while one is under way"
        if "metadata" in kinds:
            assert not self._begun, "initial metadata twice"
            self._begun = True
        if kinds == ["collected"]:
            assert self._begun, "initial metadata is missing"
            assert not self._status_started, "something after the status"
            assert "send" not in self._pending, "a second message while one is under way"
            if not self.over:
                self.collected.append(operations[0].content)
            self._pending["collected"] = batch
            self._end("collected", success=not self.over)
            return
        if "message" in kinds or "status" in kinds:
            assert self._begun, "initial metadata is missing"
            assert not self._status_started, "something after the status"
            self._status_started = "status" in kinds
        if "close" in kinds:
            assert not self._close_asked, "asked for the close twice"
            self._close_asked = True
        if "message" in kinds or "status" in kinds:
            self._pending["send"] = batch
        elif kinds == ["receive"]:
            self._pending["receive"] = batch
        else:
            assert kinds == ["close"]
            self._pending["close"] = batch
        self.settle()

    def settle(self) -> None:
        """Complete the operations that can complete now."""
        if (batch := self._pending.get("receive")) and (self.sent or self.half_closed or self.over):
            batch.operations[0].content = self.sent.popleft() if self.sent and not self.over else None
            self._end("receive", success=True)
        if self.over:
            if "send" in self._pending:
                self._end("send", success=False)
            if batch := self._pending.get("close"):
                batch.operations[0].gone = self.cancelled
                self._end("close", success=True)

    def deliver(self) -> None:
        """Complete the outstanding send; its content reaches the client unless the call is over."""
        batch = self._pending.get("send")
        if batch is None or self.over:
            return
        self.got += self.collected
        self.collected.clear()
        for operation in batch.operations:
            if operation.kind == "message":
                self.got.append(operation.content)
            elif operation.kind == "status":
                self.status = operation.content
        self._end("send", success=True)
        self.settle()

    def cancel(self) -> None:
        """Cancel the call as its client."""
        if not self.over:
            self.cancelled = True
            self.settle()

    def _end(self, kind: str, *, success: bool) -> None:
        batch = self._pending.pop(kind)
        self.core.events.append(
            (batch.tag, SimpleNamespace(success=success, batch_operations=batch.operations))
        )
