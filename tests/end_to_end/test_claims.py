"""A run that claims GPUs which its process does not use, against the real daemon on the mock driver."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from services import Daemon, end_processes, fetch, wait_until

from gpuwarden.host import pid_namespace
from gpuwarden.protocol.codec import encode
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, Hello, Report
from mock_nvml import MockNvml

GPUS = 8
FULL = DeviceMemory(current=10**9, peak=10**9, limit=10**9, reserved=10**9)


@contextmanager
def claim(daemon: Daemon) -> Iterator[dict[str, Any]]:
    """Report as a run of this process that has used up its limit on every GPU; yield the state that has it."""
    uuids = [dict(labels)["uuid"] for labels in daemon.samples().all("gpuwarden_gpu_info")]
    assert len(uuids) == GPUS
    devices = {f"GPU:{number}": uuid for number, uuid in enumerate(uuids)}
    report = Report("train", 7, 1.0, (0,) * (len(STEP_BUCKETS) + 1), dict.fromkeys(devices, FULL))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(daemon.socket))
        connection.send(encode(Hello("claim", "none", devices)))
        connection.send(encode(report))

        def seen() -> dict[str, Any] | None:
            state: dict[str, Any] = json.loads(fetch(f"{daemon.url}/api/v1/state") or "{}")
            return state if any(run.get("steps") == 7 for run in state.get("runs", ())) else None

        yield wait_until(seen, "the run in the state")


@pytest.fixture
def daemon(tmp_path: Path, mock_nvml: MockNvml, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """Run a daemon with this `runs.trust_reports`; the driver lists this process on the last GPU."""
    config = tmp_path / "config.yaml"
    config.write_text(f"poll: {{interval: 200ms}}\nruns: {{trust_reports: {str(request.param).lower()}}}\n")
    mock_nvml.processes(GPUS - 1, {os.getpid(): 10**9})
    it = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=GPUS))
    with end_processes(it):
        wait_until(lambda: it.samples().all("gpuwarden_gpu_info"), "the first poll")
        yield it


@pytest.mark.parametrize("daemon", [False], indirect=True)
def test_claimed_gpus_are_not_affected(daemon: Daemon) -> None:
    """A run raises pressure on the GPU where the driver lists it, and on no other."""
    highest = 0 if pid_namespace.is_initial() else 1  # in another namespace the driver's list proves nothing
    with claim(daemon) as state:
        page = daemon.samples()
        levels = page.all("gpuwarden_gpu_pressure_level", resource="memory").values()
        assert sorted(levels) == [highest] * (GPUS - 1) + [2]
        assert [gpu["condition"] for gpu in state["gpus"]].count("critical") == 1
        (run,) = state["runs"]
        marks = {(device.get("unverified", False), device.get("pressure")) for device in run["devices"]}
        assert marks == {(False, "critical"), (True, "warning") if highest else (False, None)}
        unused = [device.get("unused", False) for device in run["devices"]]
        assert unused.count(True) == (0 if highest else GPUS - 1)
        used = page.all("gpuwarden_run_device_verified")
        assert sorted(used.values()) == ([1.0] if highest == 0 else [0.0] * (GPUS - 1) + [1.0])
        if highest == 0:
            assert len(page.all("gpuwarden_run_memory_headroom_bytes")) == 1
            reasons = page.all("gpuwarden_run_memory_headroom_unknown_info", reason="process_unlisted")
            assert len(reasons) == GPUS - 1


@pytest.mark.parametrize("daemon", [True], indirect=True)
def test_trusted_claims_count(daemon: Daemon) -> None:
    """The same run raises pressure on all GPUs with `runs.trust_reports`: a CPU may stand in for a GPU."""
    with claim(daemon):
        levels = daemon.samples().all("gpuwarden_gpu_pressure_level", resource="memory").values()
        assert list(levels) == [2] * GPUS
