"""Steer the mock library of processes that a test starts."""

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

Gpu = int | Literal["*"]
Key = Literal[
    "count", "ecc_dbe", "ecc_sbe", "energy", "free", "limit", "memclock", "memtotal", "memused", "mig_hides",
    "nvlink_data", "nvlink_down", "nvlink_errors", "nvlink_sum", "pcie_gen", "pcie_replay", "pcie_width", "power",
    "pstate", "recovery", "remap_cor", "remap_failed", "remap_pending", "remap_unc", "temp", "throttle", "util",
]  # fmt: skip
SETTINGS: Final = frozenset(
    {
        "gpus",
        "model",
        "mig",
        "pids",
        "procs_per_gpu",
        "delay_us",
        "delays",
        "field_delay_us",
        "delay_mode",
        "lock",
        "driver",
        "frozen",
        "devices",
    }
)
COUNTER: Final = struct.Struct("<56sQ")  # the record of src/calls.c


class MockNvml:
    """The control file, the environment and the call counters of one test's mock library.

    Rules accumulate until `clear`. Every call that begins after a method here has returned follows the new rules,
    in all processes started with `env()`; a call already under way may still answer by the old ones.
    """

    def __init__(self, library: Path, directory: Path) -> None:
        self._library = library
        self._control = directory / "mock-nvml.control"
        self._counters = directory / "mock-nvml.counters"
        self._rules: list[str] = []
        self._last_xid = 0
        self._last_stamp_ns = 0
        self._rewrite()

    def env(self, **settings: str | int) -> dict[str, str]:
        """Return the variables to add to a process's environment; `gpus=2` sets MOCK_NVML_GPUS, and so on."""
        if unknown := settings.keys() - SETTINGS:
            raise ValueError(f"no such setting of the mock: {', '.join(sorted(unknown))}; try {sorted(SETTINGS)}")
        path = [str(self._library), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {
            "LD_LIBRARY_PATH": ":".join(path),
            "MOCK_NVML_CONTROL": str(self._control),
            "MOCK_NVML_COUNTERS": str(self._counters),
            **{f"MOCK_NVML_{name.upper()}": str(value) for name, value in settings.items()},
        }

    def control(self, *lines: str) -> None:
        """Add lines of the control file's grammar; a wrong one ends the process that reads it, with a message."""
        self._rules += lines
        self._rewrite()

    def clear(self) -> None:
        """Drop all rules: lost GPUs come back, hung calls go on."""
        self._rules.clear()
        self._rewrite()

    def lose(self, gpu: int) -> None:
        """Make every call for the GPU, its lookup included, fail as if it had fallen off the bus."""
        self.error(gpu, "*", "GPU_IS_LOST")

    def hang(self, gpu: Gpu, function: str = "*") -> None:
        """Block calls until the rule is cleared; GPU "*" takes in calls that concern no GPU, such as nvmlInit_v2."""
        self.control(f"hang {gpu} {function}")

    def error(self, gpu: Gpu, function: str, code: str, probability: float = 1.0) -> None:
        """Make a function (or `prefix*`) fail; the code is NVML's name for it without NVML_ERROR_."""
        self.control(f"error {gpu} {function} {code} {probability}")

    def delay(self, gpu: Gpu, function: str, seconds: float) -> None:
        """Make each call of a function take at least this long."""
        self.control(f"delay {gpu} {function} {seconds * 1e6:.0f}")

    def set(self, gpu: Gpu, key: Key, value: float) -> None:
        """Fix a value; README.md names the keys and their units."""
        self.control(f"set {gpu} {key} {value}")

    def processes(self, gpu: Gpu, memory: Mapping[int, int | None]) -> None:
        """Show these compute processes, by pid, with their bytes; None is memory that the driver does not know."""
        self.control(f"procs {gpu} {_process_list(memory)}")

    def graphics(self, gpu: Gpu, memory: Mapping[int, int | None]) -> None:
        """Show these graphics processes; as `processes`."""
        self.control(f"graphics {gpu} {_process_list(memory)}")

    def mig(self, gpu: Gpu, *profiles: str, generation: int = 0) -> None:
        """Divide the GPU again into instances of these profiles; another generation gives equal ones other UUIDs."""
        self.control(f"mig {gpu} {','.join(profiles) or 'none'} {generation}")

    def disable_mig(self, gpu: Gpu) -> None:
        """Switch MIG off."""
        self.control(f"mig {gpu} off")

    def xid(self, gpu: int, code: int) -> None:
        """Raise one critical Xid event in every event set that listens to the GPU."""
        self._last_xid += 1
        self.control(f"xid {self._last_xid} {gpu} {code}")

    def operational(
        self,
        gpu: int,
        xid: int = 0,
        *,
        severity: int = 40,
        category: int = 3,
        attributes: int = 0,
        group_attributes: int = 0,
        group: int | None = None,
        ago: float = 0.0,
    ) -> None:
        """Raise an operational event that occurred `ago` seconds ago; the driver must be 615 or newer."""
        self._last_xid += 1
        cursor = self._last_xid if group is None else group
        at = round((time.time() - ago) * 1e6)
        numbers = severity, category, attributes, group_attributes, cursor, at
        self.control(f"operational {self._last_xid} {gpu} {xid} {' '.join(map(str, numbers))}")

    def unbind(self, gpu: int) -> None:
        """Unbind the driver from the GPU: NVML's calls for it fail, and a new session of NVML does not list it."""
        self._bind("unbind", gpu)

    def bind(self, gpu: int) -> None:
        """Bind the driver to the GPU again: a new session of NVML lists it."""
        self._bind("bind", gpu)

    def _bind(self, rule: str, gpu: int) -> None:
        self._last_xid += 1
        self.control(f"{rule} {self._last_xid} {gpu}")

    def driver(self, version: str) -> None:
        """Change the driver version."""
        self.control(f"driver {version}")

    def calls(self) -> dict[str, int]:
        """Count the calls so far, by function, over all processes; a call counts when it begins."""
        records = COUNTER.iter_unpack(self._counters.read_bytes()) if self._counters.exists() else ()
        return {name.rstrip(b"\0").decode(): count for name, count in records if count}

    def _rewrite(self) -> None:
        # The mock compares the file's identity at each call. Times that only grow distinguish two files written
        # within one tick of the file system's clock.
        self._last_stamp_ns = max(time.time_ns(), self._last_stamp_ns + 1)
        fresh = self._control.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in self._rules), encoding="utf-8")
        os.utime(fresh, ns=(self._last_stamp_ns, self._last_stamp_ns))
        fresh.replace(self._control)


def _process_list(memory: Mapping[int, int | None]) -> str:
    entries = (f"{pid}:na" if size is None else f"{pid}:{size}B" for pid, size in memory.items())
    return ",".join(entries) or "none"
