"""The status page of a real server in a real browser: it loads, draws charts, and reports a lost
server.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from browser.chromium import Chromium, needs_chromium
from e2e.fixtures import Serve
from support.processes.server import ServerProcess

from tensorferry.client import InferenceClient, InferenceError

pytestmark = needs_chromium

HOSTILE = "<img src=x onerror=document.title='owned'></td><script>document.title='owned'</script>"

MEMBERS = "[...document.querySelectorAll('#members tbody tr')].map((row) => row.firstChild.textContent)"

# Name and state of each, as the page shows them.
PROCESSES = [["server 0", "serving"], ["server 1", "serving"]]


@contextmanager
def traffic(address: str, model: str, callers: int = 6) -> Iterator[None]:
    """Callers of the digits model, each with its own name in request ids, one of them with markup."""
    over = threading.Event()
    failures: list[BaseException] = []

    def call(number: int) -> None:
        name = HOSTILE if number == 0 else f"caller-{number}"
        images = np.zeros((1 + number % 3, 8, 8), np.uint8)
        try:
            with InferenceClient(address) as client:
                while not over.is_set():
                    client.infer(model, {"image": images}, request_id=name, timeout=30)
                    # Refused, because its deadline is too short.
                    with pytest.raises(InferenceError):
                        client.infer(model, {"image": images}, request_id=name, parameters={"timeout": 1})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]


def test_the_page_under_load(serve: Serve, digits_model: Path, page: Chromium) -> None:
    server = serve(
        digits_model,
        f"other={digits_model}",
        "--metrics-port",
        0,
        "--max-batch-size",
        4,
        "--priority-weights",
        "2,1",
    )
    url = server.ready["metrics"].removesuffix("metrics")
    page.open(url)
    page.until("document.getElementById('state').textContent", lambda text: text == "Ready")
    assert page.evaluate("document.getElementById('no-batches').hidden") is False
    with traffic(server.address, "digits"):
        # The charts have data: areas, lines and bars.
        page.until("document.querySelectorAll('#throughput .area').length", lambda count: count >= 2)
        page.until("document.querySelectorAll('#latency .lineof').length", lambda count: count == 3)
        page.until("document.querySelectorAll('#sizes .bar').length", lambda count: count >= 2)
        page.until("document.querySelectorAll('#reasons .row').length", lambda count: count >= 1)
        answered = page.evaluate("document.querySelector('#tiles .value').textContent")
        assert float(re.sub(r"[^\d.]", "", answered)) > 0
        # The requests of a batch are shown.
        names = {HOSTILE, *(f"caller-{number}" for number in range(1, 6))}
        seen = page.until(MEMBERS, bool)
        assert set(seen) <= names
        page.until(
            f"state.report.models[0].last_batches.some((batch) => (batch.members || []).some((one) => one.id === {HOSTILE!r}))"
        )
        # A chosen batch stays selected while others arrive, until the newest is followed again.
        page.until("document.querySelectorAll('#last-batches button').length", lambda count: count >= 3)
        page.evaluate("document.querySelector('#last-batches button:nth-child(3)').click()")
        chosen = page.evaluate("document.querySelector('#manifest h3').textContent")
        looked = page.evaluate("state.report.now_seconds")
        page.until("state.report.now_seconds", lambda now: now > looked + 1)
        assert page.evaluate("document.querySelector('#manifest h3').textContent") == chosen
        page.evaluate("document.querySelector('#manifest button').click()")
        page.until("document.querySelector('#manifest h3').textContent", lambda text: text != chosen)
        # The id with markup is shown as text.
        page.until(
            f"(() => {{ const at = state.report.models[0].last_batches.find((batch) => (batch.members || []).some((one) => "
            f"one.id === {HOSTILE!r})); if (!at) return 0; state.batch = at; state.follow = false; render(); return 1; }})()"
        )
        assert HOSTILE in page.evaluate(MEMBERS)
        assert "owned" not in page.evaluate("document.title")
    # Select another model by its button and by the address, from the keyboard.
    page.evaluate("document.querySelector('#models tr:nth-child(2) button').focus()")
    page.key("Enter", "Enter", 13, "\r")
    page.until("document.getElementById('name').textContent", lambda text: text == "other · version 1")
    assert page.evaluate("decodeURIComponent(location.hash)") == "#other/1"
    assert page.evaluate("document.querySelector('#inputs').textContent") == "InputsimageUINT8 [batch, 8, 8]"
    assert "weights 2 : 1" in page.evaluate("document.querySelector('#settings').textContent")
    assert {one.removeprefix(url).partition("#")[0] for one in page.requested} == {"", "status.json"}


def test_a_server_that_is_gone(serve: Serve, digits_model: Path, page: Chromium) -> None:
    server = serve(digits_model, "--metrics-port", 0)
    page.open(server.ready["metrics"].removesuffix("metrics"))
    page.until("document.getElementById('state').textContent", lambda text: text == "Ready")
    assert page.evaluate("document.getElementById('lost').hidden")
    server.stop()
    page.until("!document.getElementById('lost').hidden")
    assert "has not answered since" in page.evaluate("document.getElementById('lost').textContent")
    assert page.evaluate("document.getElementById('lost').getAttribute('role')") == "alert"
    assert page.evaluate("document.getElementById('state').textContent") == "No answer"
    assert page.evaluate("document.getElementById('name').textContent") == "digits · version 1"
    # The browser's own message about an unreachable server.
    assert all("net::ERR_" in error for error in page.errors)
    page.errors.clear()


APP = """
import numpy as np

from tensorferry.serving import FP64, model, pipeline


@model(inputs={"x": FP64[-1]}, outputs={"y": FP64[-1]}, max_batch_size=8)
def clean(x):
    return x + 1


@model(inputs={"y": FP64[-1]}, outputs={"words": FP64[-1]}, max_batch_size=8)
def split(y):
    return y * 2


@model(inputs={"words": FP64[-1]}, outputs={"vector": FP64[-1]}, max_batch_size=4)
def encode(words):
    return words


@model(inputs={"words": FP64[-1]}, outputs={"number": FP64[-1]}, max_batch_size=2)
def count(words):
    return words


branched = pipeline("branched", clean, split, encode, count, outputs=["vector", "number", "y"])
outer = pipeline("outer", "branched")
"""


def test_a_pipeline_is_drawn_with_its_branches(serve: Serve, page: Chromium, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    server = serve(tmp_path / "app.py", "--metrics-port", 0)
    page.open(server.ready["metrics"].removesuffix("metrics"))
    page.until("document.getElementById('flow-note').textContent", lambda text: "No request was" in text)
    with InferenceClient(server.address) as client:
        for _ in range(4):
            client.infer("branched", {"x": np.zeros(2)}, request_id="seen", timeout=30)
        boxes = page.until(
            "[...document.querySelectorAll('.stage .called')].map((one) => one.textContent)",
            lambda names: len(names) == 3,
        )
        assert boxes == ["clean+split", "encode", "count"]
        shares = page.until(
            "[...document.querySelectorAll('.stage')].map((one) => one.firstChild.lastChild.textContent)",
            lambda texts: all(text.endswith("%") for text in texts),
        )
        percents = [int(share.removesuffix(" %")) for share in shares]
        # One that a busy machine delays may leave less than half a percent to another.
        assert all(0 <= percent <= 100 for percent in percents)
        assert any(percents)
        steps = "[...document.querySelectorAll('.stage .step')].map((one) => one.textContent)"
        assert [text.split()[0] for text in page.evaluate(steps)] == ["clean", "split", "encode", "count"]
        assert all(text.endswith("s") for text in page.evaluate(steps)), "each has a time"
        # Three edges end at the answer: one of the first stage, which passes the others, and one of each branch.
        assert page.evaluate("document.querySelectorAll('#flow .tip').length") == 6
        assert page.evaluate("document.querySelectorAll('#flow .via').length") == 1
        for width in (360, 1280):
            page.window(width, 900)
            page.evaluate("render()")
            assert page.evaluate("document.documentElement.scrollWidth") == width
            drawn_down = page.evaluate("document.getElementById('flow').classList.contains('down')")
            assert drawn_down is (width == 360)
        # A click on a stage shows its batches.
        assert (
            page.evaluate("document.querySelector('#last-batches-title .of-stage').textContent")
            == "stage count"
        )
        page.evaluate("document.querySelector('.stage').click()")
        title = "document.querySelector('#last-batches-title .of-stage').textContent"
        assert page.evaluate(title) == "stage clean+split"
        assert page.evaluate("document.querySelector('.stage').getAttribute('aria-pressed')") == "true"
        client.infer("branched", {"x": np.zeros(2)}, request_id="seen", timeout=30)
        assert "seen" in page.until(MEMBERS, bool)
        page.until("document.querySelector('#manifest dl').textContent", lambda text: "stepsclean" in text)
        # A pipeline of another model: its stage has the figures of that model, and a click selects it.
        client.infer("outer", {"x": np.zeros(2)}, timeout=30)
        page.evaluate("location.hash = 'outer/1'")
        page.until("document.getElementById('name').textContent", lambda text: text == "outer · version 1")
        assert page.evaluate("document.querySelector('.stage .called').textContent") == "branched · model"
        assert page.evaluate("document.getElementById('no-batches').hidden") is False
        page.evaluate("document.querySelector('.stage').click()")
        page.until("document.getElementById('name').textContent", lambda text: text == "branched · version 1")


@pytest.fixture(scope="module")
def watched(share: Serve, digits_model: Path) -> ServerProcess:
    return share(digits_model, "--metrics-port", 0)


def test_it_fits_windows_of_any_width(watched: ServerProcess, page: Chromium) -> None:
    with InferenceClient(watched.address) as client:
        client.infer("digits", {"image": np.zeros((1, 8, 8), np.uint8)}, timeout=30)
    for width in (360, 768, 1280):
        page.window(width, 800, dark=width == 768)
        page.open(watched.ready["metrics"].removesuffix("metrics"))
        page.until("document.getElementById('state').textContent", lambda text: text == "Ready")
        page.until("!document.getElementById('batches').hidden")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        # As for a moment while windows are resized: nothing is drawn with a negative size, which would
        # be an error.
        page.window(60, 400)
        page.evaluate("render()")


def test_pause_theme_and_accessibility_labels(watched: ServerProcess, page: Chromium) -> None:
    page.open(watched.ready["metrics"].removesuffix("metrics"))
    page.until("document.getElementById('state').textContent", lambda text: text == "Ready")
    page.key(" ", "Space", 32, " ")
    assert page.evaluate("state.paused") is True
    assert page.evaluate("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
    looked = page.evaluate("state.report.now_seconds")
    page.evaluate("document.getElementById('pause').click()")
    page.until("state.report.now_seconds", lambda now: now > looked)
    light, dark = (
        page.evaluate(
            f"(theme({name!r}), getComputedStyle(document.body).getPropertyValue('background-color'))"
        )
        for name in ("light", "dark")
    )
    assert light != dark
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    told = [
        (node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]
    ]
    assert ("heading", "tensorferry") in told
    assert ("heading", "digits · version 1") in told
    assert any(role in ("image", "img") and name.startswith("Throughput by outcome:") for role, name in told)
    assert not [role for role, name in told if role in ("button", "link", "table") and not name]


def test_the_processes_of_a_server(serve: Serve, digits_model: Path, page: Chromium) -> None:
    server = serve(digits_model, "--metrics-port", 0, "--processes", 2)
    page.open(server.ready["metrics"].removesuffix("metrics"))
    cells = "[...document.querySelectorAll('#processes tr')].map((row) => [...row.children].map((cell) => cell.textContent))"
    rows = page.until(cells, lambda rows: [row[:2] for row in rows] == PROCESSES)
    assert all(
        int(pid) > 1 and restarts == "0" and memory.endswith("iB") for *_, pid, restarts, memory in rows
    )
    facts = page.evaluate("document.getElementById('facts').textContent")
    assert facts.startswith(f"{server.address} · {server.ready['transport']} transport")
