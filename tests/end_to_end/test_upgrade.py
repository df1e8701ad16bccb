"""Upgrade under a running daemon: pages, API and diagnoses go on after its files are replaced or gone."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_user import connect
from message_receivers import HttpReceiver, http_receiver
from services import ROOT, Daemon, Samples, end_processes, wait_until

from gpuwarden.protocol.codec import encode
from gpuwarden.protocol.messages import STEP_BUCKETS, Allocation, DeviceMemory, Error, Hello, Report
from gpuwarden.web.static_files import FOLDER
from mock_nvml import MockNvml

GIB = 2**30
UUID = "GPU-a0b1c2d0-4d4f-434b-8000-000000000000"
STATIC = [f"/page/{path.relative_to(FOLDER)}" for path in FOLDER.rglob("*") if path.suffix in (".js", ".css", ".svg")]
PAGES = [
    *("/", *STATIC, "/metrics", "/-/healthy", "/-/ready"),
    *("/api/v1/state", "/api/v1/history", "/api/v1/runs", "/api/v1/runs?limit=9"),
]
# Lists modules that are looked for after the daemon has said where it listens.
PROGRAM = """
import sys
def hook(event, arguments, late=sys.argv.pop(1)):
    if event == "import":
        with open(late, "a") as file:
            print(arguments[0], file=file)
sys.addaudithook(hook)
from gpuwarden.cli.main import main
sys.exit(main())
"""


def get(daemon: Daemon, path: str, **headers: str) -> bytes:
    """Fetch a path, which must be there; compressed if asked for."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body = response.read()
        assert response.status == 200, (path, response.status, body[:500])
        return gzip.decompress(body) if response.headers.get("content-encoding") == "gzip" else body
    finally:
        connection.close()


def run_out_of_memory(daemon: Daemon) -> None:
    """Report a run that leaks, fails for memory and ends, as this process."""
    run = connect(str(daemon.socket))
    run.send(encode(Hello("late", "tensorflow", {"GPU:0": UUID}, hears=True)))
    buckets = (0,) * len(STEP_BUCKETS)
    for steps in range(1, 30):
        memory = {"GPU:0": DeviceMemory(steps * GIB, steps * GIB, 32 * GIB)}
        run.send(encode(Report("train", steps, float(steps), (*buckets, steps), memory, batch_size=64)))
    allocations = (Allocation(8 * GIB, "64,1024", "float", "MatMul", "GPU:0", "GPU_0_bfc"),)
    memory = {"GPU:0": DeviceMemory(29 * GIB, 29 * GIB, 32 * GIB)}
    run.send(encode(Error("device_oom", "OutOfMemory", "OOM", "train", 29, allocations, memory)))
    wait_until(lambda: b'"device_oom"' in get(daemon, "/api/v1/runs"), "the error")
    run.close()


@pytest.fixture
def receiver() -> Iterator[HttpReceiver]:
    """Yield a receiver of notifications."""
    with http_receiver() as made:
        yield made


@pytest.mark.parametrize("how", ["swapped", pytest.param("removed", marks=pytest.mark.slow)])
def test_daemon_needs_none_of_its_files(how: str, tmp_path: Path, mock_nvml: MockNvml, receiver: HttpReceiver) -> None:
    """The daemon answers first requests as before after its package was removed or replaced by another version.

    Every page, both formats of metrics, dcgm's names, a diagnosis, a webhook, pause and resume, and the end.
    """
    library, late = tmp_path / "lib/gpuwarden", tmp_path / "late"
    shutil.copytree(ROOT / "src/gpuwarden", library, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "config.yaml").write_text(
        f"compat: dcgm\npoll: {{interval: 200ms}}\nnotify: {{webhook: {receiver.url}/hook, group_wait: 0}}\n"
    )
    paths = os.pathsep.join((str(library.parent), *sys.path))
    environment = {**mock_nvml.env(gpus=2), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    config = str(tmp_path / "config.yaml")
    program = (sys.executable, "-c", PROGRAM, str(late))
    daemon = Daemon(tmp_path / "box", "--config", config, env=environment, program=program)
    with end_processes(daemon):
        wait_until(lambda: "gpuwarden.daemon.daemon" in late.read_text(), "the modules of the start")
        late.unlink()
        shutil.rmtree(library)
        if how == "swapped":
            library.mkdir()
            (library / "__init__.py").write_text("raise ImportError('the new version')\n")
        for path in PAGES:
            get(daemon, path, **{"Accept-Encoding": "gzip"})
        mock_nvml.processes(0, {os.getpid(): 30 * GIB})
        mock_nvml.xid(1, 79)
        mock_nvml.lose(1)
        run_out_of_memory(daemon)
        state = wait_until(lambda: (found := json.loads(get(daemon, "/api/v1/state")))["runs"] and found, "the run")
        wait_until(lambda: b'"diagnosis"' in get(daemon, "/api/v1/runs"), "the diagnosis")
        get(daemon, state["runs"][0]["record"])
        assert receiver.receive()
        wait_until(lambda: b"XID 79" in get(daemon, "/api/v1/state"), "the XID")
        wait_until(lambda: daemon.samples().up() == [1.0, 0.0], "the lost GPU")
        assert b"# EOF" in get(daemon, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert Samples(daemon.page()).value("DCGM_FI_DEV_GPU_TEMP", gpu="0") is not None
        for order in ("pause", "resume"):
            assert daemon.run_subcommand(order).returncode == 0
        assert daemon.kill(signal.SIGTERM) == 0
        assert "Error" not in daemon.output()
    assert late.read_text().split() == [] if late.exists() else True
