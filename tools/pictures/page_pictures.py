"""Pictures of the status page in four situations, and of a run's page.

The real daemon polls the simulation in fast time until the situation is there; Chromium then opens the status page
with that state. Needs chromium and pngquant.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest import mock

from history import Clock
from situations import (
    HOST,
    LEAKING,
    LEAKING_RUN,
    LOST_SECONDS,
    SITUATIONS,
    SimulatedBox,
    Situation,
    with_xid,
)

from gpuwarden.daemon.daemon import Daemon
from gpuwarden.web.http_messages import HttpRequest

_ROOT = Path(__file__).parents[2]
sys.path.append(str(_ROOT / "tests" / "support"))

from browser import Browser, chromium  # noqa: E402 - the tests' own, found only now

STEP = 2.0  # seconds between polls
LARGEST = 200_000  # bytes of a picture


@dataclass(frozen=True, slots=True)
class Picture:
    """Upper `height` pixels of the page in a situation; None: all of it.

    `card` is the anchor of an opened card. With `run`, a name, it is of the page of that run.
    """

    situation: str
    name: str
    width: int
    scheme: Literal["light", "dark"]
    height: int | None = None
    card: str = ""
    run: str = ""


DOCS = (
    Picture("near-oom", "status-page", 1280, "dark", 800),
    Picture("hot", "status-page-card", 1280, "light", 980, "gpu-4"),
    Picture("gpu-lost", "status-page-phone", 390, "light", 820),
    Picture("leaking", "run-page", 1280, "light", 1010, run=LEAKING_RUN),
)


async def _brought_about(situation: Situation, clock: Clock) -> Daemon:
    """Return a daemon that has polled until the situation is there."""
    box = SimulatedBox(situation, clock)
    async for _ in box.polls(STEP):
        pass
    return box.daemon


def _complete(daemon: Daemon, clock: Clock) -> None:
    """Add a host that is not this machine, and the XID of a lost GPU."""
    state = daemon.routes.state
    if state is None:
        raise RuntimeError("no poll")
    state = with_xid(state, clock.time() - LOST_SECONDS)
    daemon.routes.show(replace(state, host=HOST))


@contextlib.contextmanager
def _served(daemon: Daemon, clock: Clock) -> Iterator[str]:
    """Serve the daemon's answers at that time."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with mock.patch(
                "gpuwarden.web.api.state_document.uname", return_value=SimpleNamespace(nodename="gpu-box-1")
            ):
                path, _, query = self.path.partition("?")
                answer = asyncio.run(daemon.web.router.respond(HttpRequest("GET", path, query, {})))
            self.send_response_only(answer.status)
            headers = {**answer.headers, "content-type": answer.content_type, "content-length": str(len(answer.body))}
            for name, value in {**headers, "date": formatdate(clock.time(), usegmt=True)}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, *_: object) -> None:
            """Do nothing."""

    with (
        mock.patch("gpuwarden.records.recorder.time", SimpleNamespace(**vars(time) | {"time": clock.time})),
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server,
    ):
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


_DRAWN = """[...document.querySelectorAll('.chart, .memory-chart')].filter((e) => e.checkVisibility()).every((e) =>
  e.getBoundingClientRect().top > innerHeight || e.querySelector('canvas'))"""
# So that the day of the picture is today.
_NOW = """{{
  const Real = Date;
  Date = class extends Real {{ constructor(...given) {{ super(...(given.length ? given : [{0}])); }} }};
  Date.now = () => {0};
}}"""


def _take(browser: Browser, url: str, picture: Picture, path: Path, now: float) -> None:
    tab = browser.open_tab(picture.width, 1000)
    tab.set_media_preference(picture.scheme)
    tab.call("Emulation.setTimezoneOverride", timezoneId="UTC")
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=_NOW.format(round(now * 1000)))
    tab.open(f"{url}#{picture.card}")
    tab.wait_until("document.querySelector('.diagnosis h2')")
    height = picture.height or int(tab.evaluate("document.documentElement.scrollHeight"))
    tab.resize(picture.width, height)  # charts are drawn where they are seen
    tab.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    tab.wait_until(_DRAWN)
    tab.take_screenshot(path, whole=False)
    tab.close()


def _path(daemon: Daemon, picture: Picture) -> str:
    """Return the path of the page below the daemon's address."""
    runs = daemon.routes.state.runs if daemon.routes.state else ()
    return next((f"run/{run.peer.run_id}" for run in runs if run.hello.name == picture.run), "")


def take(directory: Path, pictures: tuple[Picture, ...]) -> None:
    """Take these pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder)) as browser:
        for situation in (*SITUATIONS, LEAKING):
            wanted = [each for each in pictures if each.situation == situation.name]
            if not wanted:
                continue
            clock = Clock()
            with clock.running():
                daemon = asyncio.run(_brought_about(situation, clock))
                _complete(daemon, clock)
            with _served(daemon, clock) as url:
                for picture in wanted:
                    path = directory / f"{picture.name}.png"
                    _take(browser, f"{url}{_path(daemon, picture)}", picture, path, clock.time())
                    print(path, path.stat().st_size)


def shrink(path: Path) -> None:
    """Reduce a picture's colors; raises RuntimeError if it is still too large."""
    subprocess.run(["pngquant", "--force", "--strip", "--output", path, "96", path], check=True)
    if (size := path.stat().st_size) > LARGEST:
        raise RuntimeError(f"{path}: {size} bytes are more than {LARGEST}")


def take_for_docs() -> None:
    """Take the pictures of docs/use/dashboards.md#status-page and docs/use/runs.md, as small files."""
    folder = _ROOT / "docs" / "pictures"
    take(folder, DOCS)
    for picture in DOCS:
        shrink(folder / f"{picture.name}.png")
