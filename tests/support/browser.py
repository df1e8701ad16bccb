"""A real Chromium, driven by its DevTools protocol over a pipe: no driver program, no port."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from system_parts import needs

PATIENCE_SECONDS = 30.0
FLAGS = (
    "--headless",
    "--no-sandbox",  # needed as root, and the page is our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


def _pipe() -> tuple[int, int]:
    """Make a pipe whose numbers are none that the shell is to give away."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


class Browser:
    """One Chromium; `open_tab` opens pages in it. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        there, self._out = _pipe()
        self._in, here = _pipe()
        program = needs("chromium", "chromium")
        # The protocol's pipes are Chromium's file descriptors 3 and 4.
        script = f'exec "$@" 3<&{there} 4>&{here} {there}<&- {here}>&-'
        command = ["bash", "-c", script, "chromium", program, *FLAGS, f"--user-data-dir={folder}/profile"]
        with (folder / "chromium.log").open("wb") as log:
            self._popen = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=(there, here))
        os.close(there)
        os.close(here)
        self._unread = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def open_tab(self, width: int = 1280, height: int = 900) -> Tab:
        """Open a page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Tab(self, session, target, width, height)

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; keep events that arrive meanwhile. Raises RuntimeError."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._in], [], [], PATIENCE_SECONDS)[0]:
                raise TimeoutError("Chromium does not answer")
            more = os.read(self._in, 1 << 20)
            if not more:
                raise EOFError("Chromium has ended")
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError, EOFError, RuntimeError, TimeoutError):
            self.call("Browser.close")
        os.close(self._out)
        try:
            self._popen.wait(10)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        os.close(self._in)


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str, target: str, width: int, height: int) -> None:
        self._browser, self._session, self._target = browser, session, target
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Evaluate an expression in the page."""
        return self._browser.call(method, self._session, **parameters)

    def events(self, method: str) -> list[dict[str, Any]]:
        """Return the events of one kind received up to now."""
        self.evaluate("0")  # what came before is read
        mine = (each for each in self._browser.events if each.get("sessionId") == self._session)
        return [dict(each["params"]) for each in mine if each["method"] == method]

    def open(self, url: str) -> None:
        """Go there, and wait until the document is loaded."""
        self.call("Page.navigate", url=url)
        self.wait_until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript, or of its promise. Raises RuntimeError."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def wait_until(self, expression: str, limit: float = PATIENCE_SECONDS) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + limit
        while not self.evaluate(f"!!({expression})"):
            if time.monotonic() > end:
                shown = self.evaluate("document.body.innerText")
                raise AssertionError(f"not within {limit:g} s: {expression}; the page says:\n{shown}")
            time.sleep(0.05)

    def text(self, selector: str = "body") -> str:
        """Return the visible text of all that match, a line each."""
        return str(
            self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText).join('\\n')")
        )

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """Resize the window, in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def set_media_preference(self, scheme: Literal["light", "dark"], motion: str = "no-preference") -> None:
        """Set a media preference, such as a dark color scheme."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str, code: int) -> None:
        """Press a key, by its name and its number in Windows."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def take_screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a PNG of the whole page, or of the window only."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """Close it."""
        self._browser.call("Target.closeTarget", targetId=self._target)


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Run a Chromium, with its files in a folder."""
    browser = Browser(folder)
    try:
        yield browser
    finally:
        browser.close()
