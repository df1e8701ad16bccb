"""Days of events of a training host in minutes: `python bench/churn.py FOLDER`, until standard input ends.

Jobs are processes that start and end on the GPUs; most report to the daemon like training runs, and end with or without
a message. The driver loses GPUs, changes their number, hangs, fails and goes away, one fault at a time, and recovers.
FOLDER has the mock's control file and the daemon's socket. Restores everything at the end.
"""

import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpuwarden.client.connection import DaemonConnection
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, End, Hello, Report

GPUS = 8
JOBS = 16  # at once
TICK_SECONDS = 0.05
MAX_JOB_SECONDS = 2.0
MAX_FAULT_SECONDS = 0.5
FAULT_CHANCE = 0.05  # in a tick without one
REPORT_SECONDS = 0.02
MEMORY = 4 << 30  # bytes a job holds
XIDS = (13, 31, 48, 63, 79, 94, 119)


@dataclass(frozen=True, slots=True)
class Job:
    """Process on a GPU, and its end (monotonic)."""

    pid: int
    gpu: int
    until: float


# The kinds of job: each begins in a process of its own, which is killed if it does not end by itself.


def train(folder: Path, gpu: int) -> None:
    """Report as a run until killed."""
    _report(folder, gpu, sys.maxsize)


def finish(folder: Path, gpu: int) -> None:
    """Report for a while and end with a message."""
    _report(folder, gpu, 20).send(End("exit"))


def end_silently(folder: Path, gpu: int) -> None:
    """Report for a while and end without a message."""
    _report(folder, gpu, 5)


def _report(folder: Path, gpu: int, count: int) -> DaemonConnection:
    hello = Hello(f"job {gpu}", "soak", devices={"GPU:0": None}, visible_devices=str(gpu))
    connection = DaemonConnection(str(folder / "run.sock"), hello)
    buckets = [0] * (len(STEP_BUCKETS) + 1)
    for step in range(count):
        buckets[step % len(buckets)] += 1
        memory = {"GPU:0": DeviceMemory(MEMORY // 2 + step, MEMORY // 2 + step)}
        connection.send(
            Report("train", step + 1, 0.1 * step, tuple(buckets), memory, epoch=step // 100, batch=step % 100)
        )
        time.sleep(REPORT_SECONDS)
    return connection


def send_invalid(folder: Path, _gpu: int) -> None:
    """Send an invalid message, and keep the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(folder / "run.sock"))
        client.send(os.urandom(100))
        client.send(b'{"v":1,"type":"report"}')
        time.sleep(MAX_JOB_SECONDS)


def run_silently(_folder: Path, _gpu: int) -> None:
    """Use the GPU and report nothing."""
    time.sleep(MAX_JOB_SECONDS)


KINDS: tuple[Callable[[Path, int], None], ...] = (train, finish, end_silently, send_invalid, run_silently)


def start(folder: Path, rng: random.Random) -> Job:
    """Start one job."""
    kind, gpu = rng.choice(KINDS), rng.randrange(GPUS)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            kind(folder, gpu)
        finally:
            os._exit(0)
    return Job(pid, gpu, time.monotonic() + rng.uniform(0.1, MAX_JOB_SECONDS))


def kill(job: Job) -> None:
    """End a job and reap it."""
    os.kill(job.pid, signal.SIGKILL)
    os.waitpid(job.pid, 0)


def choose_fault(rng: random.Random) -> list[str]:
    """Choose a fault, as a line of the control file."""
    gpu, other = rng.randrange(GPUS), rng.randrange(GPUS)
    return rng.choice(
        [
            [f"error {gpu} * GPU_IS_LOST"],
            [f"error {gpu} * GPU_IS_LOST", f"error {other} * GPU_IS_LOST"],
            [f"set * count {rng.randrange(GPUS)}"],
            [f"hang {gpu}"],
            [f"hang {gpu} nvmlDeviceGetMemoryInfo_v2"],
            [f"hang {gpu} nvmlDeviceGetFieldValues"],
            ["hang *"],
            [f"delay {gpu} nvmlDeviceGetComputeRunningProcesses_v3 30000"],
            [f"error {gpu} nvmlDeviceGetPowerUsage UNKNOWN"],
            ["error * nvmlDeviceGetUtilizationRates UNKNOWN 0.5"],
            [f"error {gpu} nvmlDeviceGetTemperatureV FUNCTION_NOT_FOUND"],
            ["error * nvmlDeviceGetComputeRunningProcesses_v3 INSUFFICIENT_SIZE 0.5"],
            ["error * * UNINITIALIZED", "error * nvmlInit_v2 DRIVER_NOT_LOADED"],
        ]
    )


def render_rules(jobs: list[Job], faults: list[str], xid: str) -> str:
    """Return the contents of the control file."""
    held = {gpu: [job.pid for job in jobs if job.gpu == gpu] for gpu in range(GPUS)}
    lists = [f"procs {gpu} {','.join(f'{pid}:{MEMORY}B' for pid in pids) or 'none'}" for gpu, pids in held.items()]
    return "".join(f"{line}\n" for line in (*lists, *faults, xid))


def write_control(control: Path, text: str) -> None:
    """Replace the control file in one step."""
    fresh = control.with_suffix(".next")
    fresh.write_text(text, encoding="ascii")
    fresh.replace(control)


def main() -> None:
    """Run jobs and faults until standard input ends."""
    folder, rng = Path(sys.argv[1]), random.Random(1)  # noqa: S311 - the same each time
    control = folder / "mock-nvml.control"
    jobs: list[Job] = []
    faults: list[str] = []
    until, xid, events = 0.0, "", 0
    while not select.select([sys.stdin], [], [], TICK_SECONDS)[0]:
        now = time.monotonic()
        for job in [job for job in jobs if job.until < now]:
            jobs.remove(job)
            kill(job)
        if len(jobs) < JOBS:
            jobs.append(start(folder, rng))
        if now > until:
            faults = []
            if rng.random() < FAULT_CHANCE:
                faults, until = choose_fault(rng), now + rng.uniform(0.05, MAX_FAULT_SECONDS)
            elif rng.random() < FAULT_CHANCE:
                events += 1
                xid = f"xid {events} {rng.randrange(GPUS)} {rng.choice(XIDS)}"
        write_control(control, render_rules(jobs, faults, xid))
    for job in jobs:
        kill(job)
    write_control(control, "")


if __name__ == "__main__":
    main()
