"""Every answer belongs to its own request, and none is missing.

`make soak` checks that for minutes, and with faults.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from support.processes.server import ServerProcess

from tensorferry.client import InferenceClient

CLIENTS = 16
REQUESTS = 640


def test_many_clients_mixed_sizes_two_models(plain: ServerProcess) -> None:

    def ask(client: InferenceClient, number: int) -> None:
        rows = (1, 1, 1, 2, 3, 5, 16, 40)[number % 8]
        tag = number * 64
        if number % 3:
            x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) + np.float32(tag)
            index = np.full(rows, number % 10)
            inputs = {"x": x, "index": index, "work": np.zeros(rows, np.int64)}
            y = client.infer("probe", inputs, request_id=str(number), timeout=60)
            np.testing.assert_array_equal(y["y"], 2 * x + number % 10)
        else:
            x = np.full((rows, 1 + number % 5), tag, np.float32)
            y = client.infer("echo", {"x": x}, request_id=str(number), timeout=60)
            np.testing.assert_array_equal(y["y"], x)
        assert y.id == str(number)

    def run(index: int) -> None:
        with InferenceClient(plain.address) as client:
            for number in range(index, REQUESTS, CLIENTS):
                ask(client, number)

    with ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(run, range(CLIENTS)))
