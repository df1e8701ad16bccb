"""Leaks of real trainings, forecast by a real daemon: TensorFlow's allocator, callback, socket, metrics, log."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from services import ROOT, Daemon, Process, Samples, ending, until

from mock_nvml import MockNvml

pytest.importorskip("tensorflow")

MIB = 1 << 20
LIMIT_MIB = 128
POLL_SECONDS = 0.25
TRAINER_ENV = {
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(LIMIT_MIB),
    "TF_ENABLE_ONEDNN_OPTS": "0",  # with oneDNN an out-of-memory in graph mode ends the process by SIGSEGV
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",
}


class Trainer(Process):
    """tests/support/leaking_trainer.py, reporting to `daemon` as a run on the GPU `uuid`."""

    def __init__(self, folder: Path, daemon: Daemon, uuid: str, kind: str) -> None:
        command = [sys.executable, str(ROOT / "tests/support/leaking_trainer.py"), uuid, kind]
        super().__init__(command, folder / "trainer.log", {**TRAINER_ENV, "GPUWARDEN_SOCKET": str(daemon.socket)})

    def told(self) -> list[dict[str, Any]]:
        """Return what it has said of its epochs."""
        return [json.loads(line) for line in self.output().splitlines() if line.startswith("{") and line.endswith("}")]

    def rate(self) -> float:
        """Return by how many bytes a second what it had in use grew while it leaked, by its own clock."""
        told = [each for each in self.told() if each["leaks"]]
        return float((told[-1]["current"] - told[0]["current"]) / (told[-1]["at"] - told[0]["at"]))


@dataclass(frozen=True)
class Look:
    """What a page said of the run: bytes in use, and how they grow."""

    current: float
    rate: float | None
    seconds: float | None
    lower: float | None
    upper: float | None


def looks_at(daemon: Daemon, trainer: Trainer) -> list[Look]:
    """Look at each poll until the training ends."""
    looks: list[Look] = []
    while trainer.popen.poll() is None:
        page = daemon.samples()
        current = page.value("gpuwarden_run_allocator_memory_bytes")
        if current is not None:
            names = ("memory_growth_bytes_per_second", "seconds_to_oom", "seconds_to_oom_lower", "seconds_to_oom_upper")
            looks.append(Look(current, *(page.value(f"gpuwarden_run_{name}") for name in names)))
        time.sleep(POLL_SECONDS)
    return looks


@pytest.fixture
def daemon(tmp_path: Path, mock_nvml: MockNvml) -> Iterator[Daemon]:
    """Start a daemon that polls often."""
    config = tmp_path / "config.yaml"
    config.write_text(f"poll:\n  interval: {POLL_SECONDS * 1000:.0f}ms\n")
    started = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=1))
    with ending(started):
        yield started


def train(folder: Path, daemon: Daemon, kind: str) -> tuple[Trainer, list[Look]]:
    """Have a training of this kind run to its end, and return what was seen of it."""
    (labels,) = Samples(until(daemon.page, "the page")).all("gpuwarden_gpu_info", gpu="0")
    trainer = Trainer(folder, daemon, dict(labels)["uuid"], kind)
    with ending(trainer):
        return trainer, looks_at(daemon, trainer)


@pytest.mark.parametrize("kind", ["steps", pytest.param("validation", marks=pytest.mark.frameworks)])
def test_a_leak_is_foreseen(tmp_path: Path, daemon: Daemon, kind: str) -> None:
    """What each epoch gives back is never told; a leak is before half of its way, with its rate and a fitting end."""
    trainer, looks = train(tmp_path, daemon, kind)
    limit = LIMIT_MIB * MIB
    leaking = [each["current"] for each in trainer.told() if each["leaks"]]
    half = (leaking[0] + limit) / 2
    top = max(each["current"] for each in trainer.told() if not each["leaks"])
    first = next(look for look in looks if look.rate is not None)
    assert top - looks[0].current > 16 * MIB
    assert first.current > leaking[0]
    late = [look for look in looks if half < look.current < 0.9 * limit]
    assert len(late) > 5
    told = [look for look in late if look.rate is not None and look.seconds is not None]
    assert len(told) >= 0.9 * len(late)
    rates = [look.rate for look in told if look.rate is not None]
    assert median(rates) == pytest.approx(trainer.rate(), rel=0.25)
    for look in told:
        assert look.rate is not None
        assert look.seconds is not None
        assert look.lower is not None
        assert look.lower <= look.seconds <= (look.upper or math.inf)
    ends = [look.current + (look.rate or 0) * (look.seconds or 0) for look in told]
    assert median(ends) == pytest.approx(limit, rel=0.1)
    log = daemon.output()
    assert (
        len(re.findall(r"WARNING memory leak run=\S+ name=\w+ device=GPU-\S+ growth=.* a minute\" out_of_memory=", log))
        == 1
    )
    assert "leak ended" not in log  # the run has ended, and that is all
