"""mosec: a Rust front-end for HTTP/1.1, and one worker that takes batches of msgpack."""

from __future__ import annotations

from typing import Any

from mosec import Server, Worker
from mosec.mixin import MsgpackMixin

from serving.peers.settings import MAX_BATCH_SIZE, WINDOW_MS, Engine


class Model(MsgpackMixin, Worker):
    """Model that answers batches."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()

    def forward(self, data: list[Any]) -> list[Any]:
        """Return {"b": bytes} for each row."""
        return [{"b": row} for row in self.engine.run_bytes([row["b"] for row in data])]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Model, num=1, max_batch_size=MAX_BATCH_SIZE, max_wait_time=int(WINDOW_MS))
    server.run()
