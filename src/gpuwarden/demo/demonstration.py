"""Demo: a daemon on simulated GPUs, a training that runs out of memory, and Prometheus, in one terminal."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
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
STAND_IN_MIB = 576  # of the last simulated GPU: the limit of the training's allocator, and some more
IDLE_GPU = 7  # the last of the eight simulated GPUs, on which no simulated run is
START_SECONDS = 30.0  # within which the daemon must answer
INTERVAL_SECONDS = 1.0
OUTCOME_SECONDS = 15.0  # from the end of a training until the daemon knows its outcome
ACTS = ("leak", "retry")  # of gpuwarden.demo.training


def run(parsed: argparse.Namespace) -> int:
    """Run the demo until Ctrl-C, or until its terminal is closed. Raises OSError."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # their default would leave the programs running
    if importlib.util.find_spec("tensorflow") is None:
        raise OSError(
            "the demo needs TensorFlow: run it with `make demo`, or install it with "
            f"{sys.executable} -m pip install tensorflow-cpu"
        )
    listen = _choose_address(parsed.listen or os.environ.get("GPUWARDEN_LISTEN"))
    with tempfile.TemporaryDirectory(prefix="gpuwarden-demo-") as name, contextlib.ExitStack() as programs:
        folder = Path(name)
        config = folder / "config.yaml"
        config.write_text(f"simulation: {{stand_in_memory: {STAND_IN_MIB}MiB}}\n")
        environment = {**os.environ, "GPUWARDEN_SOCKET": str(folder / "run.sock")}
        serve = [sys.executable, "-m", "gpuwarden", "serve", "--source", "simulated", "--listen", str(listen)]
        serve += ["--config", str(config)]
        daemon = programs.enter_context(running(serve, environment, folder / "daemon.log"))
        uuid = _await_gpu(listen, daemon, folder / "daemon.log")
        print(f"Demo on 8 SIMULATED GPUs. The training on GPU {IDLE_GPU} is real: it leaks until its 512 MiB are full,")
        print("and is then started again in a way that survives. Three minutes; stop with Ctrl-C.\n")
        print(f"status page  {daemon_url(listen)}/")
        print(f"terminal     GPUWARDEN_LISTEN={listen} gpuwarden top", flush=True)
        prometheus = _start_prometheus(programs, listen, folder)
        print(flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            _Play(Story(listen, prometheus), daemon, folder).run(uuid, environment)
    return 0


def _choose_address(text: str | None) -> Address:
    """Return the address to listen on; port 0 becomes a free port. Raises OSError."""
    try:
        address = ADDRESS.read(text) if text else Config().web.listen
    except ValueError as error:
        raise OSError(f"--listen: {error}") from None
    if not address.port:
        return address._replace(port=_free_port(0))
    with contextlib.suppress(ApiError):
        fetch_json(address, STATE)
        raise OSError(f"another daemon listens on {address}; choose a port: gpuwarden demo --listen 127.0.0.1:9847")
    return address


def _await_gpu(listen: Address, daemon: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the daemon's first poll, and return the UUID of the idle GPU. Raises OSError."""
    end = time.monotonic() + START_SECONDS
    while daemon.poll() is None and time.monotonic() < end:
        with contextlib.suppress(ApiError):
            state = ApiObject(fetch_json(listen, STATE))
            return next(gpu.text("uuid") for gpu in state.parts("gpus") if gpu.number("index") == IDLE_GPU)
        time.sleep(0.05)
    raise OSError(log.read_text(errors="replace").strip().removeprefix("gpuwarden: "))


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
    raise OSError("no port of 127.0.0.1 is free")


class _Play:
    """Performance of the demo: runs the trainings one after the other, and prints what happens."""

    def __init__(self, story: Story, daemon: subprocess.Popen[bytes], folder: Path) -> None:
        self._story = story
        self._daemon = daemon
        self._folder = folder
        self._began = time.monotonic()
        self._columns = shutil.get_terminal_size().columns

    def run(self, uuid: str, environment: dict[str, str]) -> None:
        """Run the trainings, and print what happens until Ctrl-C.

        Raises OSError if the daemon ends, or a training without an outcome.
        """
        for act in ACTS:
            command = [sys.executable, "-m", "gpuwarden.demo.training", act, RUN_NAME, uuid]
            with running(command, environment, self._log("training")) as trainer:
                self._follow(trainer)
        print("The daemon keeps running until you press Ctrl-C.", flush=True)
        while True:
            self._pause()

    def _follow(self, trainer: subprocess.Popen[bytes]) -> None:
        before, deadline = len(self._story.outcomes), math.inf
        while len(self._story.outcomes) == before or trainer.poll() is None:
            if trainer.poll() is not None:
                deadline = min(deadline, time.monotonic() + OUTCOME_SECONDS)
            self._pause()
            if time.monotonic() > deadline:
                raise self._failed("training")

    def _pause(self) -> None:
        time.sleep(INTERVAL_SECONDS)
        for line in self._story.new_lines():
            when = f"{time.monotonic() - self._began:4.0f} s  "
            indent = " " * (len(when) + 2)
            print(textwrap.fill(line, self._columns, initial_indent=when, subsequent_indent=indent), flush=True)
        if self._daemon.poll() is not None:
            raise self._failed("daemon")

    def _log(self, program: str) -> Path:
        return self._folder / f"{program}.log"

    def _failed(self, program: str) -> OSError:
        return OSError(f"the {program} ended:\n{self._log(program).read_text(errors='replace')[-2000:]}")
