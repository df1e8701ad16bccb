"""Demonstration: its programs, started and ended together, and a line about what happens in them."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpuwarden.simulation.simulated_nvml import Simulation

RULES = Path(__file__).parents[3] / "deploy" / "prometheus" / "rules" / "gpuwarden.yml"
PROMETHEUS_PORT = 9090
IDLE_GPU = 7  # of the simulated box: the training's memory is not mixed with a simulated run's there
STORY_INTERVAL_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LIBC = ctypes.CDLL(None)
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy reaches this machine


class DemoError(OSError):
    """The demonstration cannot go on; the text says why and what to do."""


def run(parsed: argparse.Namespace) -> int:
    """Run the demonstration until Ctrl-C, or until its terminal is closed. Raises DemoError."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # by default they would leave the programs behind
    if importlib.util.find_spec("tensorflow") is None:
        raise DemoError(
            "the demonstration trains with TensorFlow, which is not installed: `make demo` installs it, or "
            f"{sys.executable} -m pip install tensorflow-cpu"
        )
    print("The GPUs of this demonstration are SIMULATED; the training is real: TensorFlow's")
    print("allocator, held to 512 MiB of this machine's memory, stands in for the memory of")
    print(f"simulated GPU {IDLE_GPU}.\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="gpuwarden-demo-") as name, contextlib.ExitStack() as programs:
        folder = Path(name)
        environment = {**os.environ, "GPUWARDEN_SOCKET": str(folder / "run.sock")}
        serve = [sys.executable, "-m", "gpuwarden", "serve", "--source", "simulated", "--listen", parsed.listen]
        daemon = programs.enter_context(running(serve, environment, folder / "daemon.log"))
        url = _await_url(daemon, folder / "daemon.log")
        uuid = _uuid(IDLE_GPU)
        training = [sys.executable, "-m", "gpuwarden.demo.training", uuid]
        trainer = programs.enter_context(running(training, environment, folder / "training.log"))
        print(f"status page  {url}/\nmetrics      {url}/metrics", flush=True)
        prometheus = _start_prometheus(programs, url, folder)
        print("\nCtrl-C ends all of it.\n", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            _follow({"daemon": daemon, "training": trainer}, lambda: _describe_state(url, uuid, prometheus), folder)
    return 0


@contextlib.contextmanager
def running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program whose output goes to a file, and end it with the context, or with this process."""
    with log.open("wb") as output:
        # A session of its own: Ctrl-C reaches this process alone, which then ends the others in order.
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(_end_with_parent, os.getpid()),  # noqa: PLW1509 - this process has one thread
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent ends, also by SIGKILL."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _uuid(index: int) -> str:
    nvml = Simulation().nvml
    nvml.nvmlInit()
    return nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index))


def _await_url(daemon: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the daemon says where it listens."""
    while daemon.poll() is None:
        text = log.read_text(errors="replace")
        if " metrics http://" in text and "\n" in text.partition(" metrics http://")[2]:
            return "http://" + text.partition(" metrics http://")[2].partition("/metrics")[0]
        time.sleep(0.05)
    raise DemoError(log.read_text(errors="replace").strip().removeprefix("gpuwarden: "))


def _start_prometheus(programs: contextlib.ExitStack, url: str, folder: Path) -> str | None:
    """Start Prometheus with the project's rules, where there is one; return its address."""
    program = shutil.which("prometheus")
    if program is None:
        print("No Prometheus was found, so no alert will fire. To see one:\nsudo apt-get install prometheus")
        return None
    if not RULES.exists():
        print(
            "No Prometheus is started: the alert rules are not part of this installation.\nFrom a checkout: make demo"
        )
        return None
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "gpuwarden", "static_configs": [{"targets": [url.removeprefix("http://")]}]},
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{_free_port(PROMETHEUS_PORT)}"
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/prometheus"]
    command.append(f"--web.listen-address={address}")
    programs.enter_context(running(command, dict(os.environ), folder / "prometheus.log"))
    print(f"alerts       http://{address}/alerts   one fires in one to two minutes")
    return f"http://{address}"


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise DemoError("no port of 127.0.0.1 is free")


def _follow(programs: dict[str, subprocess.Popen[bytes]], story: Callable[[], str], folder: Path) -> None:
    """Say what happens until a program ends or the person has seen enough."""
    began, told = time.monotonic(), ""
    while True:
        time.sleep(STORY_INTERVAL_SECONDS)
        for name, process in programs.items():
            if process.poll() is not None:
                text = (folder / f"{name}.log").read_text(errors="replace")[-2000:]
                raise DemoError(f"the {name} ended with status {process.returncode}:\n{text}")
        line = story()
        if line and line != told:
            print(f"{time.monotonic() - began:4.0f} s  {line}", flush=True)
            told = line


def _describe_state(url: str, uuid: str, prometheus: str | None) -> str:
    """Sum up the training's memory and the alert about it."""
    page = _fetch(f"{url}/metrics")
    values = {
        line.partition("{")[0]: float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith(("gpuwarden_run_memory_headroom_bytes{", "gpuwarden_run_allocator_memory_bytes{"))
        and uuid in line
    }
    in_use = values.get("gpuwarden_run_allocator_memory_bytes")
    left = values.get("gpuwarden_run_memory_headroom_bytes")
    if in_use is None or left is None:
        return "the training starts"
    alert = f"   RunNearOutOfMemory {_alert_state(prometheus)}" if prometheus else ""
    return f"{in_use / 2**20:.0f} MiB in use, headroom {left / 2**20:.0f} MiB{alert}"


def _alert_state(prometheus: str) -> str:
    """Return the state of the demonstration's alert: inactive, pending or firing."""
    body = _fetch(f"{prometheus}/api/v1/alerts")
    alerts: list[dict[str, Any]] = json.loads(body)["data"]["alerts"] if body else []
    ours = [each for each in alerts if each["labels"].get("run_name") == "demo-training"]
    states = {each["state"] for each in ours if each["labels"]["alertname"] == "RunNearOutOfMemory"}
    return "FIRING" if "firing" in states else "pending" if states else "inactive"


def _fetch(url: str) -> str:
    try:
        with _DIRECTLY.open(url, timeout=5) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return ""
