"""HTTP/2 client that can break any rule: h2 with all its checks off."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import unquote_to_bytes

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

PREFIX = "/inference.GRPCInferenceService/"
Header = tuple[bytes, bytes]


def framed(message: bytes, *, flag: int = 0, length: int | None = None) -> bytes:
    """Return a gRPC message with its prefix, which may state a wrong length."""
    return struct.pack(">BI", flag, len(message) if length is None else length) + message


def headers_of(rpc: str = "ModelInfer", **changed: str | None) -> list[Header]:
    """Return a call's headers; `changed` by name, with _ for -, None omits one."""
    fields: dict[str, str | None] = {
        ":method": "POST", ":scheme": "http", ":path": PREFIX + rpc, ":authority": "localhost",
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    for name, value in changed.items():
        plain = name.replace("_", "-")
        fields[f":{plain}" if f":{plain}" in fields else plain] = value
    return [(name.encode(), value.encode()) for name, value in fields.items() if value is not None]


def say_no_more(connection: socket.socket) -> None:
    """Shut down the sending side; a connection already closed by the server is no error."""
    try:
        connection.shutdown(socket.SHUT_WR)
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise


def abort(connection: socket.socket) -> None:
    """Close a connection by RST: SO_LINGER with time 0 discards unsent and unread bytes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@dataclass(slots=True)
class Answer:
    """Outcome of one call. `ended`: by the server, in any way; `reset` is the code of an RST_STREAM."""

    status: int | None = None
    grpc_status: int | None = None
    message: str = ""
    data: bytes = b""
    ended: bool = False
    reset: int | None = None

    @property
    def messages(self) -> list[bytes]:
        """Return the messages in the data."""
        found, data = [], self.data
        while len(data) >= 5:
            (size,) = struct.unpack(">I", data[1:5])
            found.append(data[5 : 5 + size])
            data = data[5 + size :]
        return found


class Connection:
    """One connection; `closed` once the server has closed it."""

    def __init__(
        self,
        address: str,
        timeout: float,
        *,
        window: int | None = None,
        wrap: Callable[[socket.socket], socket.socket] = lambda bare: bare,
    ) -> None:
        self.socket = wrap(self.raw(address, timeout))
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(
                client_side=True,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=False,
            )
        )
        if window is not None:
            # From the first frame on, because later settings hold only once the server has
            # acknowledged them.
            self.h2.local_settings = h2.settings.Settings(
                client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
            )
        self.h2.initiate_connection()
        self.answers: dict[int, Answer] = {}
        self.closed = False
        self.goaway: int | None = None
        self.pings = 0
        self.flush()

    @staticmethod
    def raw(address: str, timeout: float) -> socket.socket:
        """Open a bare connection that has sent nothing."""
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def flush(self) -> None:
        """Send pending frames; a connection already closed by the server is no error."""
        self.write(self.h2.data_to_send())

    def write(self, data: bytes) -> None:
        """Send bytes unchanged."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def begin(self, headers: Sequence[Header], *, last: bool = False) -> int:
        """Begin a call with these headers; return its stream id."""
        call: int = self.h2.get_next_available_stream_id()
        self.answers[call] = Answer()
        self.h2.send_headers(call, headers, end_stream=last)
        return call

    def send(self, call: int, data: bytes, *, last: bool = False) -> None:
        """Send bytes of a call within the server's window; nothing once the call is over."""
        try:
            room = self.h2.local_flow_control_window(call)
            size = self.h2.max_outbound_frame_size
            data = data[:room]
            for at in range(0, len(data) or 1, size):
                self.h2.send_data(call, data[at : at + size], end_stream=last and at + size >= len(data))
        except (h2.exceptions.StreamClosedError, h2.exceptions.ProtocolError):
            pass

    def send_all(self, call: int, data: bytes) -> None:
        """Send the call's last bytes as the window allows, unless the server has ended the call."""
        answer, at = self.answers[call], 0
        while at < len(data) and not (answer.ended or self.closed):
            room = min(self.h2.local_flow_control_window(call), self.h2.max_outbound_frame_size)
            if room > 0:
                self.h2.send_data(call, data[at : at + room], end_stream=at + room >= len(data))
                at += room
                self.flush()
            else:
                self.read()

    def reset(self, call: int) -> None:
        """Reset the call."""
        try:
            self.h2.reset_stream(call, h2.errors.ErrorCodes.CANCEL)
        except h2.exceptions.StreamClosedError:
            pass

    def read(self) -> bool:
        """Read the server's next frames; return whether there were any."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self.closed = True
            return False
        for event in self.h2.receive_data(data):
            self._note(event)
        self.flush()
        return True

    def await_answers(self, calls: Sequence[int]) -> None:
        """Read until these calls, or the connection, have ended; raise TimeoutError after the socket's
        timeout.
        """
        while not self.closed and not all(self.answers[call].ended for call in calls):
            self.read()

    def ping(self) -> None:
        """Return once the server has acknowledged a ping, and so has read everything sent before."""
        before = self.pings
        self.h2.ping(b"attacker")
        self.flush()
        while self.pings == before and not self.closed:
            self.read()

    def _note(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            self.goaway = int(event.error_code or 0)
        elif isinstance(event, h2.events.PingAckReceived):
            self.pings += 1
        answer = self.answers.get(getattr(event, "stream_id", 0))
        if answer is None:
            return
        if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
            for name, value in event.headers or ():
                if name == b":status":
                    answer.status = int(value)
                elif name == b"grpc-status":
                    answer.grpc_status = int(value)
                elif name == b"grpc-message":
                    answer.message = unquote_to_bytes(bytes(value)).decode(errors="replace")
        elif isinstance(event, h2.events.DataReceived):
            answer.data += event.data or b""
            self.h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            answer.ended = True
        elif isinstance(event, h2.events.StreamReset):
            answer.ended, answer.reset = True, int(event.error_code or 0)
