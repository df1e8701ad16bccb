"""Demo: a daemon on simulated GPUs, a training that runs out of memory, and Prometheus, in one terminal."""

from __future__ import annotations

import argparse
import contextlib
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
from pathlib import Path

from gpuwarden.cli.common.api_client import ApiError, daemon_url, fetch_json
from gpuwarden.config.schema import Config
from gpuwarden.config.value_types import ADDRESS, Address
from gpuwarden.demo.story import RUN_NAME, Story
from gpuwarden.launcher.background import running
from gpuwarden.web.api.api_object import ApiObject
from gpuwarden.web.api.api_paths import STATE

RULES = Path(__file__).parents[3] / "deploy" / "prometheus" / "rules" / "gpuwarden.yml"
PROMETHEUS_PORT = 9090
IDLE_GPU = 7  # of the eight simulated GPUs; no simulated run uses memory there
START_SECONDS = 30.0  # within which the daemon must answer
INTERVAL_SECONDS = 1.0
DIAGNOSIS_SECONDS = 10.0  # from the end of the training


class DemoError(OSError):
    """The demo cannot continue; the text says why and what to do."""


def run(parsed: argparse.Namespace) -> int:
    """Run the demo until Ctrl-C, or until its terminal is closed. Raises DemoError."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # their default would leave the programs running
    if importlib.util.find_spec("tensorflow") is None:
        raise DemoError(
            "the demo needs TensorFlow: run it with `make demo`, or install it with "
            f"{sys.executable} -m pip install tensorflow-cpu"
        )
    listen = _choose_address(parsed.listen or os.environ.get("GPUWARDEN_LISTEN"))
    with tempfile.TemporaryDirectory(prefix="gpuwarden-demo-") as name, contextlib.ExitStack() as programs:
        folder = Path(name)
        environment = {**os.environ, "GPUWARDEN_SOCKET": str(folder / "run.sock")}
        serve = [sys.executable, "-m", "gpuwarden", "serve", "--source", "simulated", "--listen", str(listen)]
        daemon = programs.enter_context(running(serve, environment, folder / "daemon.log"))
        uuid = _await_gpu(listen, daemon, folder / "daemon.log")
        training = [sys.executable, "-m", "gpuwarden.demo.training", RUN_NAME, uuid]
        trainer = programs.enter_context(running(training, environment, folder / "training.log"))
        print("Demo on 8 SIMULATED GPUs. One training is real: it leaks memory until it runs out of")
        print(f"the 512 MiB that stand for the memory of GPU {IDLE_GPU}. Stop with Ctrl-C.\n")
        print(f"status page  {daemon_url(listen)}/")
        print(f"terminal     GPUWARDEN_LISTEN={listen} gpuwarden top", flush=True)
        prometheus = _start_prometheus(programs, listen, folder)
        print(flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            _follow(Story(listen, prometheus), daemon, trainer, folder)
    return 0


def _choose_address(text: str | None) -> Address:
    """Return the address to listen on; port 0 becomes a free port. Raises DemoError."""
    try:
        address = ADDRESS.read(text) if text else Config().web.listen
    except ValueError as error:
        raise DemoError(f"--listen: {error}") from None
    if not address.port:
        return address._replace(port=_free_port(0))
    with contextlib.suppress(ApiError):
        fetch_json(address, STATE)
        raise DemoError(f"another daemon listens on {address}; choose a port: gpuwarden demo --listen 127.0.0.1:9847")
    return address


def _await_gpu(listen: Address, daemon: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the daemon's first poll, and return the UUID of the idle GPU. Raises DemoError."""
    end = time.monotonic() + START_SECONDS
    while daemon.poll() is None and time.monotonic() < end:
        with contextlib.suppress(ApiError):
            state = ApiObject(fetch_json(listen, STATE))
            return next(gpu.text("uuid") for gpu in state.parts("gpus") if gpu.number("index") == IDLE_GPU)
        time.sleep(0.05)
    raise DemoError(log.read_text(errors="replace").strip().removeprefix("gpuwarden: "))


def _start_prometheus(programs: contextlib.ExitStack, listen: Address, folder: Path) -> Address | None:
    """Start Prometheus with gpuwarden's alert rules, if it is installed; return its address."""
    program = shutil.which("prometheus")
    if program is None:
        print("no alerts    Prometheus is not installed: sudo apt-get install prometheus")
        return None
    if not RULES.exists():
        print("no alerts    the alert rules are in the repository only: run `make demo` there")
        return None
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "gpuwarden", "static_configs": [{"targets": [daemon_url(listen).removeprefix("http://")]}]},
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = Address("127.0.0.1", _free_port(PROMETHEUS_PORT))
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/prometheus"]
    command.append(f"--web.listen-address={address}")
    programs.enter_context(running(command, dict(os.environ), folder / "prometheus.log"))
    print(f"Prometheus   http://{address}/")
    return address


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise DemoError("no port of 127.0.0.1 is free")


def _follow(story: Story, daemon: subprocess.Popen[bytes], trainer: subprocess.Popen[bytes], folder: Path) -> None:
    """Print what happens, until Ctrl-C. Raises DemoError if the daemon ends, or the training without a diagnosis."""
    began = time.monotonic()
    ended: float | None = None
    while True:
        time.sleep(INTERVAL_SECONDS)
        now = time.monotonic()
        for line in story.new_lines():
            print(f"{now - began:4.0f} s  {line}", flush=True)
        if ended is None and trainer.poll() is not None:
            ended = now
        failed = "daemon" if daemon.poll() is not None else None
        if ended is not None and not story.diagnosed and now - ended > DIAGNOSIS_SECONDS:
            failed = "training"
        if failed:
            text = (folder / f"{failed}.log").read_text(errors="replace")[-2000:]
            raise DemoError(f"the {failed} ended:\n{text}")
