"""Processes that train under TensorFlow's own allocator: scripts of tests/support that print a JSON line a result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from memory_limit import memory_limit
from services import ROOT, Daemon, Process, wait_until

MIB = 2**20
LIMIT_MIB = 256
STARTING_SECONDS = 120.0  # for TensorFlow and a case


class TrainingProcess(Process):
    """A script with `limit` MiB of memory in TensorFlow, reporting to `daemon`; a word on its input steers it."""

    def __init__(self, script: str, folder: Path, daemon: Daemon, *arguments: str, limit: int = LIMIT_MIB) -> None:
        command = [sys.executable, str(ROOT / "tests/support" / script), *arguments]
        environment = {"TF_NUM_INTRAOP_THREADS": "1", "GPUWARDEN_SOCKET": str(daemon.socket)}
        super().__init__(command, folder / "trainer.log", memory_limit(limit) | environment)

    def list_results(self) -> list[dict[str, Any]]:
        """Return the results up to now."""
        return [json.loads(line) for line in self.output().splitlines() if line.startswith("{") and line.endswith("}")]

    def run_case(self, case: str) -> dict[str, Any]:
        """Play a case and return its result."""
        self.send_line(case)
        return wait_until(lambda: self.result(case), f"the result of {case}", STARTING_SECONDS)

    def result(self, case: str) -> dict[str, Any]:
        """Return the result of a case; empty if it has not ended."""
        return next((each for each in self.list_results() if each["case"] == case), {})


class Trainer(TrainingProcess):
    """tests/support/trainer.py as a run on the GPU `uuid`; it prints TensorFlow's figures of each epoch."""

    def __init__(self, folder: Path, daemon: Daemon, uuid: str) -> None:
        super().__init__("trainer.py", folder, daemon, uuid)

    @property
    def last(self) -> dict[str, Any]:
        """The figures of the last epoch; empty before the first epoch's end."""
        return self.list_results()[-1] if self.list_results() else {}
