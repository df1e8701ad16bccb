"""The daemon as a whole, in process: what it serves when a part of it fails."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.config import load
from gpuwarden.daemon import Daemon
from gpuwarden.exposition import Exposition
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.sources import open_source
from gpuwarden.web import Request

METRICS = Request("GET", "/metrics", "", {})


def daemon(tmp_path: Path, **settings: str) -> Daemon:
    """Make a daemon on the simulated box."""
    overrides = {"source": "simulated", "runs.socket": str(tmp_path / "run.sock")}
    config = load(None, overrides | {key.replace("__", "."): value for key, value in settings.items()})
    return Daemon(config, open_source(config.source, config.simulation))


def fails(*_: object) -> Any:
    """Stand in for a part of the daemon."""
    raise RuntimeError("a fault of our own")


def test_failed_poll_leaves_no_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a poll that fails by a fault of our own nothing is served, rather than the page of before."""
    warden = daemon(tmp_path)

    async def scenario() -> None:
        await warden.poll()
        assert warden._serve_metrics(METRICS).status == 200
        monkeypatch.setattr(RunRegistry, "runs", fails)
        await warden._poll_or_show_nothing()
        assert warden._serve_metrics(METRICS).status == 503
        assert warden._serve_ready(METRICS).status == 503
        monkeypatch.undo()
        await warden._poll_or_show_nothing()
        assert warden._serve_metrics(METRICS).status == 200

    asyncio.run(scenario())


def test_page_is_rendered_once_and_never_an_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll's page is rendered when first asked for; where that fails no older one stands in."""
    warden = daemon(tmp_path)

    async def scenario() -> None:
        await warden.poll()
        page = warden._serve_metrics(METRICS).body
        assert warden._serve_metrics(METRICS).body is page
        await warden.poll()
        assert warden._serve_metrics(METRICS).body != page
        await warden.poll()
        monkeypatch.setattr(Exposition, "render", fails)
        with pytest.raises(RuntimeError):  # which the server answers with 500
            warden._serve_metrics(METRICS)

    asyncio.run(scenario())


def test_more_simulated_runs_than_allowed_are_counted(tmp_path: Path) -> None:
    """A simulated run over the cap is refused like any other, and costs no poll."""
    warden = daemon(tmp_path, runs__max="2")

    async def scenario() -> None:
        state = await warden.poll()
        assert len(state.runs) == 2
        assert state.counts.reports_rejected["too_many_runs"] > 0

    asyncio.run(scenario())


def test_process_series_are_bounded_and_the_rest_counted(tmp_path: Path) -> None:
    """Beyond processes.max_series the processes with the least memory are left out and counted; 0 is no series."""
    warden = daemon(tmp_path, processes__max_series="3")
    state = asyncio.run(warden.poll())
    shown = [process.memory or 0 for _gpu, process in state.processes]
    held = sorted((process.memory or 0 for gpu in state.snapshot.gpus for process in gpu.processes), reverse=True)
    assert shown == held[:3]
    assert state.counts.processes_dropped == len(held) - 3
    none = asyncio.run(daemon(tmp_path, processes__max_series="0").poll())
    assert none.processes == ()
    assert none.counts.processes_dropped == 0
