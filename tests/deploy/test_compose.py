"""Compose file: it follows the specification, and the real programs accept their flags and files and become ready."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from services import ROOT, Process, end_processes, fetch, free_port, wait_until

from system_parts import needs, require
from tests.deploy.test_provisioning import SERVICES, host_path

pytestmark = pytest.mark.system


def test_compose_file_follows_the_specification() -> None:
    """The file is valid by the schema of the Compose specification."""
    program = Path(sys.executable).with_name("check-jsonschema")
    require(program.exists(), "check-jsonschema is not installed: tools/environment.sh release")
    command: list[str | Path] = [program, "--builtin-schema", "vendor.compose-spec", ROOT / "deploy/compose.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("service", "program"), [("prometheus", "prometheus"), ("alertmanager", "prometheus-alertmanager")]
)
def test_compose_commands_run(service: str, program: str, tmp_path: Path) -> None:
    """The programs become ready with these flags and files, on another port and with other data folders."""
    address = f"127.0.0.1:{free_port()}"
    command = [needs(program, program)]
    for flag in SERVICES[service]["command"]:
        name, _, value = flag.partition("=")
        if name == "--config.file":
            value = str(host_path(service, value))
        elif name in {"--storage.tsdb.path", "--storage.path"}:
            value = str(tmp_path / "data")
        elif name == "--web.listen-address":
            value = address
        command.append(f"{name}={value}")
    with end_processes(Process(command, tmp_path / "log")):
        wait_until(lambda: fetch(f"http://{address}/-/ready"), f"{service} is ready")
