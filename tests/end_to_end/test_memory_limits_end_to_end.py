"""Limit of a real process's cgroup, from the driver by nvidia-ml-py to headroom, owners and what users read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from services import Daemon, end_processes, fetch, wait_until

from gpuwarden.host.cgroup_limits import CgroupReader
from gpuwarden.protocol.codec import encode
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, Hello, Report
from mock_nvml import MockNvml
from system_parts import require

MIB = 2**20
CONTEXT = 512 * MIB  # runs.context_overhead


def own_cgroup() -> str:
    """Return the folder of this process's cgroup."""
    cgroups = CgroupReader()
    cgroups.begin()
    folders = cgroups.list_folders(Path("/proc/self/cgroup").read_text())
    require(bool(folders), "no cgroup of version 2 is mounted here")
    return folders[0]


def test_limit_of_a_cgroup_from_driver_to_users(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """The limit ends headroom long before the device does, and metrics, API and `runs show` say so."""
    folder, pid = own_cgroup(), os.getpid()
    # The process has a pool of 2 GiB, and another process of the cgroup 256 MiB.
    mock_nvml.control(f"procs * {pid}:{(2048 * MIB) + CONTEXT}B", f"limits * {folder} 1024 3072 {2048 + 512 + 256}")
    daemon = Daemon(tmp_path / "daemon", env=mock_nvml.env(gpus=1))
    with end_processes(daemon), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as run:
        run.connect(str(daemon.socket))
        (labels,) = wait_until(lambda: daemon.samples().all("gpuwarden_gpu_up"), "the GPU is polled")
        uuid = dict(labels)["uuid"]
        run.send(encode(Hello("limited", "torch", {"GPU:0": uuid})))

        def limited() -> dict[tuple[tuple[str, str], ...], float]:
            memory = {"GPU:0": DeviceMemory(1900 * MIB, 1900 * MIB, reserved=2048 * MIB)}
            run.send(encode(Report("train", 1, 1.0, (0,) * (len(STEP_BUCKETS) + 1), memory)))
            time.sleep(0.1)
            return daemon.samples().all("gpuwarden_run_memory_headroom_limit_info", uuid=uuid, limit="cgroup")

        wait_until(limited, "the limit of the cgroup is known")
        found = daemon.samples()
        # What the cgroup has left, and the unused part of the pool.
        assert found.value("gpuwarden_run_memory_headroom_bytes") == (256 + 148) * MIB
        limits = found.all("gpuwarden_owner_gpu_memory_limit_bytes", owner_kind="run")
        assert {dict(each)["limit"]: value for each, value in limits.items()} == {
            "hard": 3072 * MIB,
            "soft": 1024 * MIB,
        }
        assert found.value("gpuwarden_owner_gpu_memory_charged_bytes", owner_kind="run") == 2816 * MIB
        (each,) = json.loads(fetch(f"{daemon.url}/api/v1/state"))["runs"]
        (device,) = each["devices"]
        assert (device["headroom_limit"], device["headroom_limit_bytes"]) == ("cgroup", 3072 * MIB)
        assert device["headroom_limit_used_bytes"] == 2816 * MIB
        assert device["headroom_limit_text"] == "under its cgroup's limit of 3.00 GiB"
        shown = subprocess.run(
            [
                sys.executable,
                "-m",
                "gpuwarden",
                "runs",
                "show",
                each["run_id"],
                "--listen",
                daemon.url.partition("//")[2],
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert "404 MiB minimum under its cgroup's limit of 3.00 GiB" in " ".join(shown.stdout.split()), shown.stdout
