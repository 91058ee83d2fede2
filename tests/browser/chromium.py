"""Headless Chromium, driven by the DevTools protocol over a pipe: no driver, no port, no package."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(sys.prefix) / "clients" / "chromium" / "chromium"
# Bound for what ends at once unless something is broken.
PATIENCE = 60.0

# The protocol uses descriptors 3 and 4; the given descriptors are moved there.
_LAUNCH = """
import fcntl, os, sys
given = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for place, number in zip((3, 4), given):
    os.dup2(number, place)
os.execv(sys.argv[3], sys.argv[3:])
"""

needs_chromium = pytest.mark.skipif(
    not PROGRAM.exists() and not os.environ.get("CI"),
    reason=f"{PROGRAM} not installed: make tools installs it",
)


# Errors of an evaluation whose page was replaced by another one.
_NAVIGATED = {"Inspected target navigated or closed", "Execution context was destroyed."}


class Navigated(AssertionError):
    """The page was replaced by another one during an evaluation."""


class Chromium:
    """A browser with one page. `console` has its console messages, `errors` its uncaught errors."""

    def __init__(self, profile: Path) -> None:
        folder = PROGRAM.parent
        commands, replies = os.pipe(), os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _LAUNCH, str(commands[0]), str(replies[1]), str(PROGRAM)),
                # The sandbox needs privileges that a container seldom gives; only the project's
                # page is loaded.
                *("--headless", "--no-sandbox", "--no-zygote", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--remote-debugging-pipe", f"--user-data-dir={profile}", "--force-color-profile=srgb"),
                *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
            ],
            pass_fds=(commands[0], replies[1]),
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "LD_LIBRARY_PATH": str(folder / "lib"),
                "FONTCONFIG_FILE": str(folder / "fonts.conf"),
            },
        )
        os.close(commands[0])
        os.close(replies[1])
        self._commands, self._replies = commands[1], replies[0]
        self._numbers = itertools.count(1)
        self._received = b""
        self._session: str | None = None
        self.console: list[str] = []
        self.errors: list[str] = []
        self.requested: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        self._session = None
        try:
            self.send("Browser.close")
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._commands)
            os.close(self._replies)

    def send(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        give_up = time.monotonic() + PATIENCE
        while True:
            reply = self._receive(give_up)
            if reply.get("id") == number:
                if reply.get("error", {}).get("message") in _NAVIGATED:
                    raise Navigated(method)
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]
            self._heard(reply)

    def _receive(self, give_up: float) -> Any:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, give_up - time.monotonic()))
            assert ready, "Chromium does not answer"
            data = os.read(self._replies, 1 << 20)
            assert data, f"Chromium has ended: {self._process.poll()}"
            self._received += data
        one, _, self._received = self._received.partition(b"\0")
        return json.loads(one)

    def _heard(self, event: Any) -> None:
        kind, told = event.get("method"), event.get("params", {})
        if kind == "Runtime.consoleAPICalled":
            self.console.append(json.dumps(told["args"]))
        elif kind == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"]))
        elif kind == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(json.dumps(told["entry"]))
        elif kind == "Network.requestWillBeSent":
            self.requested.append(told["request"]["url"])

    def evaluate(self, script: str) -> Any:
        """Evaluate an expression in the page."""
        told = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, script: str, reached: Callable[[Any], Any] = bool) -> Any:
        """Wait until an expression has the expected value, on this page or the next, and return it."""
        give_up = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(Navigated):
                if reached(value := self.evaluate(script)):
                    return value
                assert time.monotonic() < give_up, f"{script} is {value!r}"
                # The page signals each redraw.
                self.evaluate("new Promise((done) => requestAnimationFrame(() => done(1)))")

    def open(self, url: str) -> None:
        """Load a page."""
        self.send("Page.navigate", url=url)
        self.until("document.readyState", lambda value: value == "complete")

    def key(self, key: str, code: str, number: int, text: str = "") -> None:
        """Press a key."""
        named = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
        self.send("Input.dispatchKeyEvent", type="keyUp", **named)

    def window(self, width: int, height: int, *, scale: float = 1.0, dark: bool = False) -> None:
        """Set the window's size in CSS pixels, the pixel ratio, and the preferred colour scheme."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
