"""Installed service in the temporary systemd of tests/systemd: its state, its metrics, and the driver it loads."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from services import fetch

from mock_nvml import MockNvml

CONFIG = Path("/etc/gpuwarden/config.yaml")
STATE = Path("/var/lib/gpuwarden")
DROP_INS = Path("/etc/systemd/system/gpuwarden.service.d")
URL = "http://127.0.0.1:9846"


def run_process(
    *words: str | Path, check: bool = True, user: str | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command until it ends; by default a failure fails the test and shows the output."""
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, user=user, env={**os.environ, **(env or {})}, timeout=120
    )
    assert not check or done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done


def read_property(name: str) -> str:
    """Return the current value of a property of the service."""
    return run_process("systemctl", "show", "--value", "--property", name, "gpuwarden").stdout.strip()


def is_active() -> bool:
    """Return whether the service has reported that it is ready."""
    return read_property("ActiveState") == "active"


def main_pid() -> int:
    """Return the daemon's pid; 0 between two daemons."""
    return int(read_property("MainPID"))


def read_journal(*options: str) -> str:
    """Return the log lines of the service, and systemd's lines about it."""
    return run_process("journalctl", "--unit", "gpuwarden", "--output", "cat", "--no-pager", *options).stdout


def add_drop_in(name: str, text: str) -> None:
    """Add a drop-in for the service, as an operator does."""
    DROP_INS.mkdir(exist_ok=True)
    (DROP_INS / f"{name}.conf").write_text(text)
    run_process("systemctl", "daemon-reload")


def read_samples(name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Return the samples of a metric by their sorted labels; empty while the daemon does not respond."""
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(fetch(f"{URL}/metrics"))
        for sample in family.samples
        if sample.name == name
    }


def read_gpus_up() -> list[float]:
    """Return gpuwarden_gpu_up of each GPU."""
    return list(read_samples("gpuwarden_gpu_up").values())


def load_mock_driver(built: Path) -> MockNvml:
    """Load the mock driver library in the service, by a drop-in."""
    directory = Path("/run/mock-nvml")
    directory.mkdir()
    # Outside /tmp: the service has a private /tmp.
    library = Path("/opt/mock-nvml")
    library.mkdir()
    for file in built.iterdir():
        (library / file.name).write_bytes(file.read_bytes())
    mock = MockNvml(library, directory)
    settings = mock.env(gpus=2)
    del settings["MOCK_NVML_COUNTERS"]  # a file that the service may not write
    add_drop_in("mock", "[Service]\n" + "".join(f"Environment={name}={value}\n" for name, value in settings.items()))
    return mock
