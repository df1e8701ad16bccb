"""Leaks of real TensorFlow trainings, reported by a real daemon: callback, socket, metrics, log and webhook."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
from message_receivers import http_receiver
from services import Daemon, Samples, end_processes, wait_until
from training_process import MIB, TrainingProcess

from mock_nvml import MockNvml
from system_parts import needs_framework

pytestmark = [pytest.mark.frameworks, needs_framework("tensorflow")]

LIMIT_MIB = 128
POLL_SECONDS = 0.25


class Trainer(TrainingProcess):
    """tests/support/leaking_trainer.py as a run on the GPU `uuid`; it prints figures of each epoch."""

    def __init__(self, folder: Path, daemon: Daemon, uuid: str, kind: str) -> None:
        super().__init__("leaking_trainer.py", folder, daemon, uuid, kind, limit=LIMIT_MIB)

    def rate(self) -> float:
        """Return the bytes a second by which it leaked, on its own clock."""
        epochs = [each for each in self.list_results() if each["leaks"]]
        return float((epochs[-1]["current"] - epochs[0]["current"]) / (epochs[-1]["at"] - epochs[0]["at"]))


@dataclass(frozen=True)
class Sample:
    """Sample of the run's metrics: bytes in use, and their growth."""

    current: float
    rate: float | None
    seconds: float | None
    lower: float | None
    upper: float | None


def sample_run(daemon: Daemon, trainer: Trainer) -> list[Sample]:
    """Sample the metrics at each poll until the training ends."""
    samples: list[Sample] = []
    while trainer.popen.poll() is None:
        page = daemon.samples()
        current = page.value("gpuwarden_run_allocator_memory_bytes")
        if current is not None:
            names = ("memory_growth_bytes_per_second", "seconds_to_oom", "seconds_to_oom_lower", "seconds_to_oom_upper")
            samples.append(Sample(current, *(page.value(f"gpuwarden_run_{name}") for name in names)))
        time.sleep(POLL_SECONDS)
    return samples


@contextmanager
def running_daemon(folder: Path, mock: MockNvml, more: str = "") -> Iterator[Daemon]:
    """Run a daemon that polls often."""
    config = folder / "config.yaml"
    config.write_text(f"poll: {{interval: {POLL_SECONDS * 1000:.0f}ms}}\nruns: {{trust_reports: true}}\n{more}")
    started = Daemon(folder / "daemon", "--config", str(config), env=mock.env(gpus=1))
    with end_processes(started):
        yield started


@pytest.fixture
def daemon(tmp_path: Path, mock_nvml: MockNvml) -> Iterator[Daemon]:
    """Start a daemon that polls often."""
    with running_daemon(tmp_path, mock_nvml) as started:
        yield started


def train(folder: Path, daemon: Daemon, kind: str) -> tuple[Trainer, list[Sample]]:
    """Run a training of this kind to its end, and return its samples."""
    (labels,) = Samples(wait_until(daemon.page, "the page")).all("gpuwarden_gpu_info", gpu="0")
    trainer = Trainer(folder, daemon, dict(labels)["uuid"], kind)
    with end_processes(trainer):
        return trainer, sample_run(daemon, trainer)


@pytest.mark.parametrize("kind", ["steps", "validation"])
def test_a_leak_is_reported(tmp_path: Path, daemon: Daemon, kind: str) -> None:
    """A leak is reported before half of it, with its rate and a fitting end; memory freed each epoch is not."""
    trainer, samples = train(tmp_path, daemon, kind)
    limit = LIMIT_MIB * MIB
    leaking = [each["current"] for each in trainer.list_results() if each["leaks"]]
    half = (leaking[0] + limit) / 2
    highest = max(each["current"] for each in trainer.list_results() if not each["leaks"])
    first = next(sample for sample in samples if sample.rate is not None)
    assert highest - samples[0].current > 16 * MIB
    assert first.current > leaking[0]
    late = [sample for sample in samples if half < sample.current < 0.9 * limit]
    assert len(late) > 5
    reported = [sample for sample in late if sample.rate is not None and sample.seconds is not None]
    assert len(reported) >= 0.9 * len(late)
    rates = [sample.rate for sample in reported if sample.rate is not None]
    assert median(rates) == pytest.approx(trainer.rate(), rel=0.25)
    for sample in reported:
        assert sample.rate is not None
        assert sample.seconds is not None
        assert sample.lower is not None
        assert sample.lower <= sample.seconds <= (sample.upper or math.inf)
    ends = [sample.current + (sample.rate or 0) * (sample.seconds or 0) for sample in reported]
    assert median(ends) == pytest.approx(limit, rel=0.1)
    log = daemon.output()
    assert (
        len(re.findall(r"WARNING memory leak run=\S+ name=\w+ device=GPU-\S+ growth=.* a minute\" out_of_memory=", log))
        == 1
    )
    assert "leak ended" not in log  # it lasts until the run ends


def test_a_leak_is_notified_without_prometheus(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """The webhook gets the OOM forecast of a leak of half a minute while a fifth of the memory is free."""
    with http_receiver() as server:
        notify = f"notify: {{webhook: {server.url}, webhook_severity: critical, group_wait: 1s}}\n"
        with running_daemon(tmp_path, mock_nvml, notify) as daemon:
            (labels,) = Samples(wait_until(daemon.page, "the page")).all("gpuwarden_gpu_info", gpu="0")
            with end_processes(Trainer(tmp_path, daemon, dict(labels)["uuid"], "steps")):
                message = server.receive(extra_seconds=120.0).content
                current = daemon.samples().value("gpuwarden_run_allocator_memory_bytes")
    (alert,) = message["firing"]
    assert alert["alert"] == "RunNearOutOfMemory"  # it has less than a minute left
    assert re.search(r" GPU 0 \(.*\) \([\d.]+ %\), [\d.]+s at its current growth", alert["description"])
    assert current is not None
    assert current < 0.8 * LIMIT_MIB * MIB
