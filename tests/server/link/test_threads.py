"""A link between many threads on each side."""

from __future__ import annotations

import queue
import select
import threading
from random import Random

from support.server.link_pair import Pair, pair

from tensorferry.server.link import LinkFull

SUBMITTING = 4
RESPONDING = 3
REQUESTS = 500


def _engine(both: Pair, stop: threading.Event) -> None:
    """One thread takes, others respond in another order."""
    work: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()

    def respond(seed: int) -> None:
        random = Random(seed)
        while (request := work.get()) is not None:
            ticket, message = request
            both.engine.mark_begun([ticket])
            both.engine.respond(ticket, message[0], [message, message[:10]])
            del message, request
            if random.random() < 0.7 or work.empty():
                both.engine.flush()
        both.engine.flush()

    threads = [threading.Thread(target=respond, args=(seed,)) for seed in range(RESPONDING)]
    for thread in threads:
        thread.start()
    poll = select.poll()
    poll.register(both.engine.fileno(), select.POLLIN)
    while not stop.is_set():
        poll.poll()
        for ticket, message, *_ in both.engine.take().submitted:
            work.put((ticket, message))
    for _ in threads:
        work.put(None)
    for thread in threads:
        thread.join()


def test_every_request_gets_its_own_response() -> None:
    failures: list[str] = []
    answered: queue.SimpleQueue[int] = queue.SimpleQueue()
    stop = threading.Event()
    room = threading.Semaphore(0)

    def submit(number: int, both: Pair) -> None:
        random = Random(number)
        for index in range(REQUESTS):
            size = random.choice([20, 100, 4096, 5000, 60_000])
            message = (bytes([number]) + b"%6d" % index) * (size // 7)
            while True:
                try:
                    ticket = both.front_end.submit(message, context=message)
                    break
                except LinkFull:
                    both.front_end.flush()
                    room.acquire()
            if random.random() < 0.2:
                both.front_end.cancel(ticket)
            if random.random() < 0.5:
                both.front_end.flush()
        both.front_end.flush()

    def receive(both: Pair) -> None:
        while responses := both.front_end.receive():
            for _, code, payload, message in responses:
                if code != message[0] or payload != message + message[:10]:
                    failures.append(f"{message[:7]!r} got {payload[:7]!r}")
                answered.put(message[0])
                room.release()

    with pair(slots=16, request_bytes=1 << 19, response_bytes=1 << 21, keep_bytes=1 << 16) as both:
        engine = threading.Thread(target=_engine, args=(both, stop))
        receiving = threading.Thread(target=receive, args=(both,))
        submitting = [threading.Thread(target=submit, args=(number, both)) for number in range(SUBMITTING)]
        for thread in (engine, receiving, *submitting):
            thread.start()
        for _ in range(SUBMITTING * REQUESTS):
            answered.get()
        for thread in submitting:
            thread.join()
        stop.set()
        both.front_end.submit(b"last", context=b"last")
        both.front_end.flush()
        engine.join()
        both.front_end.close()
        receiving.join()
    assert failures == []
