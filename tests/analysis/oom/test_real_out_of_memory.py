"""Real TensorFlow out-of-memories: callback, message, daemon on the mock driver, metrics and log line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from services import Daemon, Samples, end_processes, wait_until
from training_process import STARTING_SECONDS, TrainingProcess

from mock_nvml import MockNvml

FLOAT = 4  # bytes
WIDTH = 10_000
MIB = 1 << 20

pytestmark = pytest.mark.frameworks


@pytest.fixture
def daemon(tmp_path: Path, mock_nvml: MockNvml) -> Iterator[Daemon]:
    """Start a daemon on two mock GPUs."""
    config = tmp_path / "config.yaml"
    config.write_text("poll: {interval: 200ms}\nruns: {trust_reports: true}\n")
    started = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=2))
    with end_processes(started):
        yield started


def errors(samples: Samples) -> dict[str, float]:
    """Return the run's errors by kind."""
    return {dict(labels)["kind"]: value for labels, value in samples.all("gpuwarden_run_errors_total").items()}


def requested(samples: Samples) -> dict[str, float]:
    """Return the bytes that the last out-of-memory requested, by GPU."""
    return {dict(labels)["uuid"]: value for labels, value in samples.all("gpuwarden_run_oom_requested_bytes").items()}


def test_out_of_memories(tmp_path: Path, daemon: Daemon) -> None:
    """Each kind of TensorFlow out-of-memory is raised unchanged, counted, and reported with its figures."""
    page = wait_until(daemon.page, "the daemon's page")
    uuids = sorted(re.findall(r'gpuwarden_gpu_up\{uuid="([^"]+)"\} 1', page))
    parts = dict(zip(("CPU:0", "CPU:1"), uuids, strict=True))
    trainer = TrainingProcess("oom_cases.py", tmp_path, daemon, *uuids)
    with end_processes(trainer):
        wait_until(lambda: errors(daemon.samples()), "the run's counters", STARTING_SECONDS)
        assert set(errors(daemon.samples()).values()) == {0}
        headroom = daemon.samples().value("gpuwarden_run_memory_headroom_bytes", uuid=uuids[0])
        assert headroom == 256 * MIB

        cases = {
            "graph": 10_001,
            "validation": 10_004,
            "mirrored": 10_005,
            "eager": 10_007,
        }  # rows of the requested tensor
        for number, (case, rows) in enumerate(cases.items(), start=1):
            raised = trainer.run_case(case)
            assert raised["raised"] == "ResourceExhaustedError", case
            named = set(re.findall(r"OOM when allocating .* on \S*(CPU:\d)", raised["text"]))  # TensorFlow chooses
            expected = {parts[device]: float(rows * WIDTH * FLOAT) for device in named}
            wait_until(lambda want=expected: requested(daemon.samples()) == want, f"what {case} requested")  # type: ignore[misc]
            # The report that counts it follows the error, perhaps only in the next poll.
            wait_until(lambda count=number: errors(daemon.samples())["device_oom"] == count, f"the count of {case}")  # type: ignore[misc]
            known = daemon.samples().all("gpuwarden_run_oom_headroom_bytes")
            assert known, case
            assert all(200 * MIB < value <= 256 * MIB for value in known.values()), known
            if case == "eager":  # 64 MiB of its own, while memory in use is as before
                assert raised["more"] < MIB

        assert trainer.run_case("pipeline")["raised"] == "ResourceExhaustedError"
        assert trainer.run_case("shape")["raised"] == "InvalidArgumentError"
        wait_until(lambda: errors(daemon.samples())["shape_dtype"] == 1, "the shape's error")
        jit = trainer.run_case("jit")
        assert "Out of memory while trying to allocate 763." in jit["text"]
        wait_until(lambda: errors(daemon.samples())["device_oom"] == 5, "the compiled program's error")
        counts = errors(daemon.samples())
        assert counts == {**dict.fromkeys(counts, 0), "device_oom": 5, "host_oom": 1, "shape_dtype": 1}
        assert requested(daemon.samples()) == {}  # XLA does not say on which of two devices
        timestamps = daemon.samples().all("gpuwarden_run_last_error_timestamp_seconds")
        assert {dict(labels)["kind"] for labels in timestamps} == {"device_oom", "host_oom", "shape_dtype"}

    lines = [line for line in daemon.output().splitlines() if " kind=" in line]
    kinds = ("device_oom", "host_oom", "shape_dtype")
    first, host, shape = (next(line for line in lines if f"kind={kind} " in line) for kind in kinds)
    assert re.search(
        r"run=\d+-\d+ name=oom kind=device_oom phase=train steps=0 error=\"ResourceExhaustedError: ", first
    )
    assert "shape[10001,10000]" in first
    assert " cause=batch_too_large " in first
    assert "shape[10000,10005]" in host
    assert "Matrix size-incompatible: In[0]: [2,3], In[1]: [4,5]" in shape
