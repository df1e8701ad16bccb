"""Wall clock of a program that a test sets, while the program runs; the monotonic clock goes on, as at a real step."""

from __future__ import annotations

import subprocess
from pathlib import Path

from services import ROOT


class SteppedClock:
    """Library and file in `folder`; programs started with `env` have the stepped clock."""

    def __init__(self, folder: Path) -> None:
        shim, self._file = folder / "clock_step.so", folder / "step"
        source = ROOT / "tests/support/clock_step.c"
        subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", shim, source, "-ldl"], check=True)
        self._file.write_bytes(bytes(8))
        self.env = {"LD_PRELOAD": str(shim), "CLOCK_STEP_FILE": str(self._file)}

    def step(self, seconds: int) -> None:
        """Set the clock so many seconds ahead of the real one."""
        with self._file.open("r+b") as file:
            file.write((seconds * 10**9).to_bytes(8, "little", signed=True))
