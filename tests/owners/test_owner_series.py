"""Memory by owner, end to end: processes of this machine, the mock driver, the daemon and its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import control_groups
import psutil
import pytest
from container_runtime import Runtime
from services import Daemon, end_processes, wait_until

from gpuwarden.host.pid_namespace import needs_proof
from gpuwarden.owners.resolver import OTHER
from mock_nvml import MockNvml
from system_parts import needs, require

ID = "0123456789abcdef" * 4
GIB = 1 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a configuration whose sources of names are in it too."""
    require(not needs_proof(), "in a container with GPUs the tests' processes would have to hold one")
    lines = [
        "poll: {interval: 200ms, slow_interval: 1s}",
        f"owners: {{docker: {tmp_path}/docker.sock, podman: none, kubernetes_logs: none,",
        f"  slurm_gpustat: {tmp_path}/gpustat, max: 4}}",
    ]
    (tmp_path / "config.yaml").write_text("\n".join(lines) + "\n")
    (tmp_path / "gpustat").mkdir()
    return tmp_path


@contextlib.contextmanager
def started(folder: Path, mock: MockNvml) -> Iterator[Daemon]:
    """Run the daemon on two GPUs."""
    daemon = Daemon(folder / "daemon", "--config", str(folder / "config.yaml"), env=mock.env(gpus=2))
    with end_processes(daemon):
        yield daemon


def memory(daemon: Daemon, kind: str) -> dict[str, float]:
    """Return the memory of each owner of a kind, on all GPUs."""
    found: dict[str, float] = {}
    for line in daemon.page().splitlines():
        match = re.fullmatch(
            r'gpuwarden_owner_gpu_memory_used_bytes\{owner="(.*)",owner_kind="(.*)",uuid=".*"\} (.*)', line
        )
        if match and match[2] == kind:
            found[match[1]] = found.get(match[1], 0) + float(match[3])
    return found


@contextlib.contextmanager
def runtime(socket: Path) -> Iterator[None]:
    """Run a container runtime on a thread."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    listening = threading.Event()

    async def serve() -> None:
        async with Runtime(socket, {ID: "/train"}):
            listening.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert listening.wait(20)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_a_container_s_life(folder: Path, mock_nvml: MockNvml) -> None:
    """A process belongs to its container, by name, also as a zombie, until it is reaped."""
    root = control_groups.find_writable_roots()[-1]
    with (
        runtime(folder / "docker.sock"),
        subprocess.Popen(["sleep", "600"]) as process,
        control_groups.move_to_group(process.pid, root, b"/system.slice/docker-%b.scope" % ID.encode()),
        started(folder, mock_nvml) as daemon,
    ):
        mock_nvml.processes(0, {process.pid: GIB})
        wait_until(lambda: memory(daemon, "container") == {"train": GIB}, "the container has the memory")
        assert 'gpuwarden_access{source="docker"} 1.0' in daemon.page()
        process.kill()
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "it is a zombie")
        polls = daemon.page()
        wait_until(lambda: daemon.page() != polls, "the next poll")
        assert memory(daemon, "container") == {"train": GIB}
        process.wait()
        wait_until(lambda: memory(daemon, "user") == {"unknown": GIB}, "the driver still lists it, and it has no owner")
        assert memory(daemon, "container") == {}
        mock_nvml.processes(0, {})
        wait_until(lambda: memory(daemon, "user") == {}, "the memory is free")
        assert "gpuwarden_process_" not in daemon.page()


def test_users_and_a_job_without_a_process(folder: Path, mock_nvml: MockNvml) -> None:
    """Users are summed over their processes; a query finds a GPU that a job leaves idle."""
    require(os.geteuid() == 0, "only root can start another user's process: run this as root")
    (folder / "gpustat/1").write_text("4711 1000\n")
    with (
        subprocess.Popen(["sleep", "600"], user="nobody") as one,
        subprocess.Popen(["sleep", "600"], user="nobody") as two,
        started(folder, mock_nvml) as daemon,
    ):
        mock_nvml.processes(0, {one.pid: GIB, two.pid: GIB, 2**22: 5})
        wait_until(lambda: memory(daemon, "user") == {"nobody": 2 * GIB, "unknown": 5}, "the memory by user")
        (job,) = [line for line in daemon.page().splitlines() if line.startswith("gpuwarden_gpu_slurm_job_info{")]
        uuids = re.findall(r'gpuwarden_gpu_up\{uuid="(.*)"\}', daemon.page())
        assert job == f'gpuwarden_gpu_slurm_job_info{{slurm_job_id="4711",uuid="{uuids[1]}"}} 1.0'
        mock_nvml.processes(1, {2**22: 7})
        wait_until(lambda: memory(daemon, "slurm_job") == {"4711": 7}, "the process on the job's GPU is the job's")
        (folder / "gpustat/1").unlink()
        wait_until(lambda: "gpuwarden_gpu_slurm_job_info{" not in daemon.page(), "the job has ended")
        one.kill()
        two.kill()


def test_processes_that_come_and_go(folder: Path, mock_nvml: MockNvml) -> None:
    """Processes that end during a poll are never attributed to another owner, and the metrics stay complete."""
    churn = "while true; do true & echo $!; wait; done"
    command = ["bash", "-c", churn]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as source, started(folder, mock_nvml) as daemon:
        assert source.stdout is not None
        pids: list[int] = []
        for number, line in enumerate(source.stdout):
            pids = [int(line), *pids[:50]]
            if number % 20 == 0:
                mock_nvml.processes(0, dict.fromkeys(pids, 1))
            if number == 1000:
                break
        source.kill()
        assert set(memory(daemon, "user")) <= {"root", "unknown", str(os.getuid())}
        mock_nvml.processes(0, {os.getpid(): 3})
        wait_until(lambda: sum(memory(daemon, "user").values()) == 3, "the last list")
        assert "poll failed" not in daemon.output()


def test_series_of_hundreds_of_owners_are_bounded(folder: Path, mock_nvml: MockNvml) -> None:
    """Processes in hundreds of units have owners.max series, and one more for the rest."""
    root = control_groups.find_writable_roots()[-1]
    with contextlib.ExitStack() as stack:
        pids = []
        for number in range(40):
            process = stack.enter_context(subprocess.Popen(["sleep", "600"]))
            stack.enter_context(control_groups.move_to_group(process.pid, root, b"/train%d.service" % number))
            pids.append(process.pid)
        daemon = stack.enter_context(started(folder, mock_nvml))
        mock_nvml.processes(0, {pid: number + 1 for number, pid in enumerate(pids)})
        wait_until(lambda: sum(memory(daemon, "systemd_unit").values()) == sum(range(41)), "all memory")
        units = memory(daemon, "systemd_unit")
        assert units.pop(OTHER) == sum(range(37))
        assert units == {f"train{number}.service": number + 1 for number in range(36, 40)}
        assert re.search(r'gpuwarden_series_dropped_total\{limit="owners"\} [1-9]', daemon.page())


# The user nobody may read the files of a test that root runs, but no other user's processes.
AS_NOBODY = ["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=+dac_read_search"]
AS_NOBODY += ["--ambient-caps=+dac_read_search"]


def test_once_with_hidden_processes(folder: Path, mock_nvml: MockNvml) -> None:
    """Under hidepid=2 without privileges all memory belongs to the user unknown, and the metrics show why."""
    require(os.geteuid() == 0, "only root can mount a /proc: run this as root")
    with subprocess.Popen(["sleep", "600"]) as process:
        mock_nvml.processes(0, {process.pid: GIB})
        env = {**os.environ, **mock_nvml.env(gpus=2)}
        del env["MOCK_NVML_COUNTERS"]  # a file that this user may not write
        hiding = ["unshare", "--mount", "sh", "-c", 'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh"]
        once = [sys.executable, "-m", "gpuwarden", "once", "--config", str(folder / "config.yaml")]
        command = [*hiding, needs("setpriv", "util-linux"), *AS_NOBODY, *once]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        process.kill()
    assert done.returncode == 0, done.stderr
    assert re.search(r'owner="unknown",owner_kind="user",.* 1.073741824e\+09', done.stdout)
    assert 'gpuwarden_access{source="processes"} 0.0' in done.stdout
