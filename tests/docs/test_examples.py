"""Each script of examples/ runs without a daemon, and is an ordinary run with one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from services import ROOT, Daemon, Process, end_processes, fetch, wait_until

from system_parts import skip_without

pytestmark = pytest.mark.frameworks

# The framework that each needs, the name it reports under, its steps and examples.
EXAMPLES = {
    "batch_size": ("tensorflow", "batch size", 3 * 16, 3 * 8192),
    "gradient_tape": ("tensorflow", "gradient tape", 3 * 64, 3 * 4096),
    "jax_loop": ("jax", "jax loop", 3 * 64, 3 * 64 * 64),
    "keras_fit": ("tensorflow", "keras_fit", 3 * 113, 3 * 7200),
    "mirrored": ("tensorflow", "mirrored", 3 * 63, 3 * 8000),
    "oom_retry": ("tensorflow", "oom retry", 3 * 8, 3 * 8192),
    "retry_loop": ("torch", "retry loop", 3 * 8, 3 * 8192),
    "torch_loop": ("torch", "torch loop", 3 * 64, 3 * 4096),
}
TIME = 240  # seconds, on a machine that does much else


def test_all_are_run() -> None:
    """No example is forgotten here."""
    own = {"embedded_collector"}  # no training: tests/test_collector.py
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} - own == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Path) -> None:
    """It does the same with a daemon and without; the daemon shows it as a run with all of its steps and examples."""
    framework, run_name, steps, examples = EXAMPLES[name]
    skip_without(framework)
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    daemon = Daemon(tmp_path / "daemon", "--source", "simulated")
    with end_processes(daemon):
        absent = {**quiet, "GPUWARDEN_SOCKET": os.fspath(tmp_path / "none.sock")}
        alone = Process(command, tmp_path / "alone.log", absent)
        watched = Process(command, tmp_path / "watched.log", {**quiet, "GPUWARDEN_SOCKET": str(daemon.socket)})
        with end_processes(alone, watched):
            for each in (alone, watched):
                each.popen.wait(TIME)
        assert (alone.popen.returncode, watched.popen.returncode) == (0, 0)
        for each in (alone, watched):
            assert len([line for line in each.output().splitlines() if line.lower().startswith("epoch")]) == 3
        (labels,) = wait_until(lambda: daemon.samples().all("gpuwarden_run_info", run_name=run_name), "the run")
        assert dict(labels)["framework"].startswith(f"{framework} ")
        run = {"run_id": dict(labels)["run_id"]}
        wait_until(lambda: daemon.samples().value("gpuwarden_run_up", **run) == 0, "the run's end")
        assert daemon.samples().value("gpuwarden_run_steps_total", **run) == steps
        assert daemon.samples().value("gpuwarden_run_examples_total", **run) == examples
        if name == "keras_fit":  # it reports its loss
            assert json.loads(fetch(f"{daemon.url}/api/v1/runs/{run['run_id']}"))["loss"] > 0
