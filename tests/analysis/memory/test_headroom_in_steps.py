"""Headroom within the steps of a real leaking TensorFlow training, up to its out-of-memory error."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from memory_limit import memory_limit
from services import Daemon, Process, end_processes, wait_until

from mock_nvml import MockNvml
from system_parts import needs_framework

pytestmark = [pytest.mark.frameworks, needs_framework("tensorflow")]

MIB = 1 << 20
STEP_MIB, PIECE_MIB = 32, 0.5
SCRIPT = f"""
import json, os, sys, time
import tensorflow as tf
from gpuwarden import watch

MIB = 1 << 20
kept = []
in_use = lambda: tf.config.experimental.get_memory_info("CPU:0")["current"]
with watch("leak", devices={{"CPU:0": sys.argv[1]}}, framework="tensorflow") as run:
    try:
        while True:
            parts = [tf.zeros([MIB // 4]) for _ in range({STEP_MIB})]
            kept.append(tf.zeros([int({PIECE_MIB} * MIB) // 4]))
            del parts
            between = in_use()
            time.sleep(0.05)
            run.step()
    except tf.errors.ResourceExhaustedError:
        print(json.dumps([between]), flush=True)
    sys.stdin.read()
os._exit(0)
"""
LIMIT_MIB = 128


def test_run_that_dies_within_a_step(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """It dies with a quarter of its memory free between steps; what the steps left was next to nothing before."""
    config = tmp_path / "config.yaml"
    config.write_text("runs: {trust_reports: true}\n")  # the driver lists no process: the allocator is the CPU's
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=1))
    with end_processes(daemon):
        (labels,) = wait_until(lambda: daemon.samples().all("gpuwarden_gpu_up"), "the GPU is polled")
        uuid = dict(labels)["uuid"]
        env = {**memory_limit(LIMIT_MIB), "GPUWARDEN_SOCKET": str(daemon.socket)}
        trainer = Process([sys.executable, "-c", SCRIPT, uuid], tmp_path / "trainer.log", env)
        with end_processes(trainer):
            found: list[tuple[float, float, float | None]] = []

            def end() -> str:
                page = daemon.samples()
                between, within = (
                    page.value(f"gpuwarden_run_memory_headroom_{name}bytes") for name in ("", "in_step_")
                )
                if between is not None and within is not None:
                    found.append((within, between, page.value("gpuwarden_gpu_pressure_level", resource="memory")))
                time.sleep(0.1)
                return next((line for line in trainer.output().splitlines() if line.startswith("[")), "")

            (left_in_use,) = json.loads(wait_until(end, "the training is out of memory", 120))
    assert LIMIT_MIB * MIB - left_in_use > (STEP_MIB - 1) * MIB  # free between steps, as the next one failed
    in_step, free, level = min(found)
    assert in_step < 4 * MIB
    assert free - in_step == pytest.approx(STEP_MIB * MIB, rel=0.1)
    assert level == 2
