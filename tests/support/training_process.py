"""The process that tests/support/trainer.py is: a real fit under TensorFlow's own allocator, and a word to steer it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from services import ROOT, Daemon, Process

MIB = 2**20
LIMIT_MIB = 256
BFC_ENVIRONMENT = {
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(LIMIT_MIB),
    "TF_ENABLE_ONEDNN_OPTS": "0",  # with oneDNN an out-of-memory in graph mode ends the process by SIGSEGV
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
}


class Trainer(Process):
    """tests/support/trainer.py under TensorFlow's BFC allocator, reporting to `daemon` as a run on the GPU `uuid`."""

    def __init__(self, folder: Path, daemon: Daemon, uuid: str) -> None:
        command = [sys.executable, str(ROOT / "tests/support/trainer.py"), uuid]
        super().__init__(command, folder / "trainer.log", {**BFC_ENVIRONMENT, "GPUWARDEN_SOCKET": str(daemon.socket)})

    def epochs(self) -> list[dict[str, Any]]:
        """Return TensorFlow's figures in the training process, epoch by epoch."""
        return [json.loads(line) for line in self.output().splitlines() if line.startswith("{") and line.endswith("}")]

    @property
    def last(self) -> dict[str, Any]:
        """TensorFlow's last report; empty before the first epoch's end."""
        return self.epochs()[-1] if self.epochs() else {}
