"""Mock driver for the programs that a benchmark starts, and processes for its GPUs."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from programs import run_program

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from mock_nvml import MockNvml, build  # noqa: E402 - the tests' own, found only now

PROCESSES_PER_GPU = 3
MAX_PROCESSES = 192  # real ones; more GPUs than they suffice for show some of them twice

# Duration of calls on hardware, in microseconds (source: docs/engineering/adr/0006-tiers.md); all others take 50.
_LISTS = [f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("Compute", "Graphics", "MPSCompute")]
DELAYS: Mapping[str, int] = {
    "nvmlDeviceGetPcieThroughput": 20_000,
    **{name + version: 4_500 for name in _LISTS for version in ("", "_v2", "_v3")},
}
OTHER_DELAY = 50


def build_mock(folder: Path) -> MockNvml:
    """Build the mock driver if needed, with its control file in `folder`."""
    return MockNvml(build(ROOT / "build/mock_nvml"), folder)


def make_environment(folder: Path, **settings: str | int) -> dict[str, str]:
    """Return the environment of a program that sees the mock driver; no control file: each call would read it."""
    given = {**os.environ, **build_mock(folder).env(**settings), "STATE_DIRECTORY": str(folder / "state")}
    del given["MOCK_NVML_CONTROL"]
    given.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed is compiled once, and not at each start
    return given


def make_realistic_settings() -> dict[str, str | int]:
    """Return the settings for calls that take as long as on hardware, one at a time."""
    return {
        "delay_us": OTHER_DELAY,
        "delays": ",".join(f"{name}={delay}" for name, delay in DELAYS.items()),
        "lock": "global",
    }


def compute_driver_seconds(calls: Mapping[str, int]) -> float:
    """Return the time of these calls in a driver with realistic delays; waiting for an event takes none."""
    concern_a_gpu = {name: count for name, count in calls.items() if name.startswith(("nvmlDevice", "nvmlGpm"))}
    return sum(count * DELAYS.get(name, OTHER_DELAY) for name, count in concern_a_gpu.items()) / 1e6


@contextmanager
def start_sleepers(count: int) -> Iterator[list[int]]:
    """Start `count` processes that do nothing, for the mock's GPUs to show."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(run_program(["sleep", "3600"], {**os.environ}, Path(os.devnull))) for _ in range(count)
        ]
