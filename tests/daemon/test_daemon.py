"""The whole daemon in one process: its responses when a part of it fails."""

import asyncio
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.config.loader import load
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.daemon.poll_loop import PollLoop
from gpuwarden.daemon.sources import open_source
from gpuwarden.gpu.snapshot import GpuProcess, Snapshot
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import STATES, HostUsage
from gpuwarden.metrics.exposition import Exposition
from gpuwarden.protocol.messages import Hello
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.state import Counts, State
from gpuwarden.web.http_messages import HttpRequest
from snapshots import gpu, snapshot

METRICS = HttpRequest("GET", "/metrics", "", {})


def daemon(tmp_path: Path, **settings: str) -> Daemon:
    """Return a daemon on the simulated machine."""
    overrides = {"source": "simulated", "runs.socket": str(tmp_path / "run.sock")}
    config = load(None, overrides | {key.replace("__", "."): value for key, value in settings.items()})
    return Daemon(config, open_source(config.source, config.simulation))


def fail(*_: object) -> Any:
    """Fail like a broken part of the daemon."""
    raise RuntimeError("a fault of our own")


@pytest.mark.parametrize("wanted", ["true", "false"])
def test_opt_in_metrics_are_exported(wanted: str, tmp_path: Path) -> None:
    """An opt-in metric is exported when the configuration enables it."""
    warden = daemon(tmp_path, gpus__pcie_throughput=wanted)

    async def scenario() -> bytes:
        await warden.poll()
        return warden.routes.serve_metrics(METRICS).body

    assert (b"gpuwarden_gpu_pcie_throughput_bytes_per_second{" in asyncio.run(scenario())) == (wanted == "true")


def test_failed_poll_leaves_no_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After an internal error in a poll no metrics are served rather than old ones; it is logged once."""
    warden = daemon(tmp_path)

    async def scenario() -> None:
        await warden.poll()
        assert warden.routes.serve_metrics(METRICS).status == 200
        monkeypatch.setattr(RunRegistry, "add_poll", fail)
        for _ in range(3):
            await warden.poll_or_clear()
        assert len([record for record in caplog.records if record.exc_info]) == 1
        assert warden.routes.serve_metrics(METRICS).status == 503
        assert warden.routes.serve_ready(METRICS).status == 503
        monkeypatch.undo()
        await warden.poll_or_clear()
        assert warden.routes.serve_metrics(METRICS).status == 200

    asyncio.run(scenario())


def test_page_is_rendered_once_and_never_an_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll's metrics are rendered on the first request; if rendering fails, no older ones are served."""
    warden = daemon(tmp_path)

    async def scenario() -> None:
        await warden.poll()
        page = warden.routes.serve_metrics(METRICS).body
        assert warden.routes.serve_metrics(METRICS).body is page
        await warden.poll()
        assert warden.routes.serve_metrics(METRICS).body != page
        await warden.poll()
        monkeypatch.setattr(Exposition, "render", fail)
        with pytest.raises(RuntimeError):  # the server's response is 500
            warden.routes.serve_metrics(METRICS)

    asyncio.run(scenario())


def test_early_polls() -> None:
    """An event triggers a poll before the next one is due, later events one more, and a stop ends the wait."""
    loop = PollLoop(3600)
    polls = 0

    async def poll() -> None:
        nonlocal polls
        polls += 1
        (loop.request if polls < 3 else loop.stop)()

    async def scenario() -> None:
        now = asyncio.get_running_loop().time
        loop.request()
        await loop._sleep(now(), poll)  # due: the next poll covers it
        assert polls == 0
        loop.request()
        await asyncio.wait_for(loop.run(poll, lambda: False), 60)
        assert polls == 3

    asyncio.run(scenario())


def test_more_simulated_runs_than_allowed_are_counted(tmp_path: Path) -> None:
    """A simulated run over the limit is refused like any other, and the poll continues."""
    warden = daemon(tmp_path, runs__max="2")

    async def scenario() -> None:
        state = await warden.poll()
        assert len(state.runs) == 2
        assert state.counts.reports_rejected["too_many_runs"] > 0

    asyncio.run(scenario())


def test_host_and_runs_on_it_are_read_every_slow_interval(tmp_path: Path) -> None:
    """The metrics have the host and the usage of a run's real process; both change once per slow interval."""
    warden = daemon(tmp_path, poll__slow_interval="1h")
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    me = ProcessKey(os.getpid(), os.getuid(), int(stat[19]))
    warden.pipeline.registry.receive(me, Hello("resnet", "tensorflow 2.21.0", {}), time.monotonic())

    async def scenario() -> None:
        first, second = await warden.poll(), await warden.poll()
        assert first.host is second.host
        assert [run.peer for run in first.runs if run.host_usage] == [me]  # the simulated ones have no process
        text = warden.text
        assert f'gpuwarden_run_cpu_seconds_total{{run_id="{me.run_id}"}} ' in text
        assert text.count('gpuwarden_run_process_state{run_id="') == len(STATES)
        assert "\ngpuwarden_host_memory_available_bytes " in text
        assert 'gpuwarden_access{source="run_io"} 1.0' in text
        warden.pipeline.host._slow_due = 0.0
        assert (await warden.poll()).host is not first.host

    asyncio.run(scenario())


def test_new_runs_are_read_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's processes are read at the first poll after its hello, and every few seconds while it is new."""
    warden = daemon(tmp_path, poll__slow_interval="1h")
    begin = time.monotonic()
    now = begin
    reads: list[float] = []
    read = warden.pipeline.host._trees.read

    def recorded_read(peers: list[ProcessKey]) -> Mapping[ProcessKey, HostUsage]:
        reads.append(now - begin)
        return read(peers)

    monkeypatch.setattr(warden.pipeline.host._trees, "read", recorded_read)
    monkeypatch.setattr(
        warden.pipeline, "_source", replace(warden.pipeline._source, reports=list)
    )  # none of simulated runs
    monkeypatch.setattr(time, "monotonic", lambda: now)
    gone = ProcessKey(0, 0, 0)
    warden.pipeline.registry.receive(gone, Hello("gone", "none", {}), begin)
    warden.pipeline.registry.exited(gone, begin)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    me = ProcessKey(os.getpid(), os.getuid(), int(stat[19]))

    async def scenario() -> None:
        nonlocal now
        for second in range(10):
            now = begin + second
            await warden.poll()
        assert reads == [0]  # in the slow interval: the only run has ended
        warden.pipeline.registry.receive(me, Hello("resnet", "tensorflow 2.21.0", {}), begin + 9.5)
        for second in range(10, 200):
            now = begin + second
            runs = (await warden.poll()).runs
            assert [run.peer for run in runs if run.host_usage] == [me]
        assert reads == pytest.approx([0, *range(10, 70, 5)])

    asyncio.run(scenario())


def test_ended_run_has_its_totals_only(tmp_path: Path) -> None:
    """A run that ended has its CPU time and no memory, also between two readings."""
    warden = daemon(tmp_path)
    with subprocess.Popen(["sleep", "600"]) as process:
        stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        peer = ProcessKey(process.pid, os.getuid(), int(stat[19]))
        warden.pipeline.registry.receive(peer, Hello("resnet", "tensorflow 2.21.0", {}), time.monotonic())
        asyncio.run(warden.poll())
        assert f'gpuwarden_run_host_memory_bytes{{run_id="{peer.run_id}"}} ' in warden.text
        process.kill()
    warden.pipeline.registry.exited(peer, time.monotonic())
    asyncio.run(warden.poll())
    assert f'gpuwarden_run_cpu_seconds_total{{run_id="{peer.run_id}"}} ' in warden.text
    assert f'gpuwarden_run_host_memory_bytes{{run_id="{peer.run_id}"}} ' not in warden.text


def test_process_series_are_bounded_and_the_rest_counted(tmp_path: Path) -> None:
    """Beyond processes.max_series the processes with the least memory have no series and are counted."""
    warden = daemon(tmp_path, processes__series="true", processes__max_series="3")
    state = asyncio.run(warden.poll())
    shown = [process.memory or 0 for _gpu, process in state.processes]
    held = sorted((process.memory or 0 for gpu in state.snapshot.gpus for process in gpu.processes), reverse=True)
    assert shown == held[:3]
    assert state.counts.series_dropped["processes"] == len(held) - 3


def test_processes_have_no_series_by_default(tmp_path: Path) -> None:
    """Memory is by owner, and with processes.series by pid too, with the same names."""
    known = 'gpuwarden_owner_gpu_memory_used_bytes{owner="ada",owner_kind="user",'
    warden = daemon(tmp_path)
    asyncio.run(polled(warden, known))
    assert "gpuwarden_process_" not in warden.text
    assert 'gpuwarden_series_dropped_total{limit="processes"} 0.0' in warden.text
    chatty = daemon(tmp_path, processes__series="true")
    asyncio.run(polled(chatty, known))
    (line,) = [line for line in chatty.text.splitlines() if 'slurm_job_id="4711"' in line and "process_info" in line]
    assert 'comm="python"' in line
    assert 'user="ada"' in line
    assert 'run_id="' in line


async def polled(warden: Daemon, known: str) -> None:
    """Poll until the text is in the metrics: names are looked up between the polls."""

    async def poll() -> None:
        while known not in warden.text:
            await warden.poll()
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), 30)


def test_this_machine_s_jobs_are_not_a_simulation_s(tmp_path: Path) -> None:
    """A prolog's file about GPU 7 of this machine does not apply to a simulated one."""
    (tmp_path / "7").write_text("99 1000\n")
    warden = daemon(tmp_path, owners__slurm_gpustat=str(tmp_path), owners__kubernetes_logs=str(tmp_path))
    asyncio.run(polled(warden, 'slurm_job_id="4711"'))
    assert 'slurm_job_id="99"' not in warden.text


def test_processes_of_a_capture_are_not_looked_up(tmp_path: Path) -> None:
    """A pid in another machine's capture is not looked up here, where it may be another process."""
    source = open_source(load(None, {"source": "simulated"}).source, load(None).simulation)
    mine = GpuProcess(os.getpid(), "compute", 1)
    captured, here = replace(source, name="capture", identify=lambda _pids: {}), replace(source, name="nvml")
    for chosen, known in ((captured, False), (here, True)):
        config = load(None, {"runs.socket": str(tmp_path / "run.sock")})
        warden = Daemon(config, chosen)
        state = asyncio.run(join_snapshot(warden, snapshot(replace(gpu(0), processes=(mine,)))))
        assert (os.getpid() in state.owners.identities) is known
        assert ("processes" in state.access) is known


async def join_snapshot(warden: Daemon, current: Snapshot) -> State:
    """Return the state of a snapshot, as in a poll."""
    return warden.pipeline.join(current, 0.0, Counts())
