"""Fixtures of the tests of the web server: one of its own a test, and for pages one with a browser tab a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served_pages import Loop, run_server

from browser import Tab, chromium
from gpuwarden.web.http_server import WebServer
from page_stage import StagedPages, serve_pages


@pytest.fixture(scope="module")
def shared_tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """Yield a Chromium tab, one for all tests: opening another takes longer than most of them."""
    with chromium(tmp_path_factory.mktemp("chromium")) as made:
        yield made.open_tab()


@pytest.fixture
def tab(shared_tab: Tab) -> Tab:
    """Return the tab with its initial size and color scheme."""
    shared_tab.resize(1280, 900)
    shared_tab.set_media_preference("light")
    return shared_tab


@pytest.fixture(scope="module")
def page() -> Iterator[StagedPages]:
    """Yield a server of the page."""
    with serve_pages() as made:
        yield made


@pytest.fixture
def loop() -> Iterator[Loop]:
    """Yield a running loop; an unhandled error fails the test."""
    running = Loop()
    yield running
    running.close()
    assert running.errors == []


@pytest.fixture
def server(loop: Loop) -> Iterator[WebServer]:
    """Yield a server with its own limits."""
    with run_server(loop) as it:
        yield it
