"""The mock library, called through the real nvidia-ml-py in a process of its own."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import pytest
from services import wait_until

from mock_nvml import MockNvml

pytest_plugins = ["pytester"]

CLIENT = Path(__file__).parent / "mock_nvml" / "client.py"
DEADLINE_S = 30
TEMPERATURE = "nvmlDeviceGetTemperature(gpu({}), 0)"


class NvmlError(Exception):
    """Return the name of the binding's error, without NVMLError_."""


class Nvml:
    """A process that evaluates expressions over nvidia-ml-py."""

    def __init__(self, env: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, CLIENT], env={**os.environ, **env}, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.questions, self.answers, self.complaints = self.process.stdin, self.process.stdout, self.process.stderr

    def begin(self, expression: str) -> None:
        """Ask, and leave the answer for `finish`."""
        self.questions.write(expression + "\n")
        self.questions.flush()

    def answers_within(self, seconds: float) -> bool:
        """Wait for the answer to the pending call."""
        return bool(select.select([self.answers], [], [], seconds)[0])

    def finish(self) -> Any:
        """Return the answer to the pending call, or raise NvmlError."""
        assert self.answers_within(DEADLINE_S), "no answer"
        line = self.answers.readline()
        assert line, self.complaints.read()
        reply = cast("dict[str, Any]", json.loads(line))
        if "error" in reply:
            raise NvmlError(reply["error"])
        return reply["value"]

    def ask(self, expression: str) -> Any:
        """Return the value of an expression, or raise NvmlError."""
        self.begin(expression)
        return self.finish()

    def error(self, expression: str) -> str:
        """Return the name of the error that an expression raises."""
        with pytest.raises(NvmlError) as caught:
            self.ask(expression)
        return str(caught.value)

    def end(self) -> tuple[int, str]:
        """Close the process's input and return its exit status and complaints."""
        try:
            complaints = self.process.communicate(timeout=DEADLINE_S)[1]
        finally:
            self.process.kill()
        return self.process.returncode, complaints


class Start(Protocol):
    """Start a process with settings of the mock; `init` calls nvmlInit first."""

    def __call__(self, *, init: bool = True, **settings: str | int) -> Nvml:
        """Start it."""


@pytest.fixture
def start(mock_nvml: MockNvml) -> Iterator[Start]:
    """Start processes that end with the test."""
    started: list[Nvml] = []

    def start_one(*, init: bool = True, **settings: str | int) -> Nvml:
        nvml = Nvml(mock_nvml.env(**settings))
        started.append(nvml)
        if init:
            nvml.ask("nvmlInit()")
        return nvml

    yield start_one
    mock_nvml.clear()  # a hung call would keep its process from seeing the end of its input
    for nvml in started:
        nvml.end()


@pytest.mark.parametrize(("ci", "outcome"), [("", {"skipped": 1}), ("true", {"errors": 1})])
def test_machine_without_compiler_skips_except_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, outcome: dict[str, int]
) -> None:
    """The outcome names the package to install in both cases."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pytester.makepyfile("pytest_plugins = ['mock_nvml.fixtures']\ndef test_needing_it(mock_nvml): pass")
    ran = pytester.runpytest_subprocess("-rs", timeout=DEADLINE_S)
    ran.assert_outcomes(**outcome)
    ran.stdout.fnmatch_lines(["*apt-get install gcc libc6-dev*"])


def test_initialization_fails_by_rule(mock_nvml: MockNvml, start: Start) -> None:
    """A driver that is not loaded refuses nvmlInit until the rule goes."""
    mock_nvml.error("*", "nvmlInit_v2", "DRIVER_NOT_LOADED")
    nvml = start(init=False)
    assert nvml.error("nvmlInit()") == "DriverNotLoaded"
    mock_nvml.clear()
    nvml.ask("nvmlInit()")
    assert nvml.ask("nvmlDeviceGetCount()") == 8


def test_calls_need_initialization(start: Start) -> None:
    """Nothing answers before nvmlInit or after nvmlShutdown."""
    nvml = start(init=False, gpus=1)
    assert nvml.error("nvmlDeviceGetCount()") == "Uninitialized"
    nvml.ask("nvmlInit()")
    assert nvml.ask("nvmlDeviceGetCount()") == 1
    nvml.ask("nvmlShutdown()")
    assert nvml.error("nvmlDeviceGetCount()") == "Uninitialized"


def test_function_is_unsupported_by_rule(mock_nvml: MockNvml, start: Start) -> None:
    """A rule for one function leaves the others unchanged; a prefix matches all that start with it."""
    nvml = start(gpus=2)
    mock_nvml.error("*", "nvmlDeviceGetPowerUsage", "NOT_SUPPORTED")
    mock_nvml.error(1, "nvmlDeviceGetPcie*", "UNKNOWN")
    assert nvml.error("nvmlDeviceGetPowerUsage(gpu(0))") == "NotSupported"
    assert nvml.error("nvmlDeviceGetPcieThroughput(gpu(1), 0)") == "Unknown"
    assert nvml.ask("nvmlDeviceGetPcieReplayCounter(gpu(0))") == 0
    assert nvml.ask("nvmlDeviceGetEnforcedPowerLimit(gpu(0))") == 700_000


def test_function_that_the_mock_does_not_write_out_is_unsupported(mock_nvml: MockNvml, start: Start) -> None:
    """The functions generated for the rest of the binding count, refuse, and fail with their GPU."""
    nvml = start(gpus=1)
    nvml.ask("globals().update(held=gpu(0))")
    assert nvml.error("nvmlDeviceGetAPIRestriction(held, 0)") == "NotSupported"
    mock_nvml.lose(0)
    assert nvml.error("nvmlDeviceGetAPIRestriction(held, 0)") == "GpuIsLost"
    assert mock_nvml.calls()["nvmlDeviceGetAPIRestriction"] == 2


def test_function_newer_than_the_driver_is_not_found(start: Start) -> None:
    """Functions that driver 590 does not export are missing from the library."""
    nvml = start(gpus=1)
    assert nvml.error("pynvml._nvmlGetFunctionPointer('nvmlSystemGetCPER_v1')") == "FunctionNotFound"


def test_devices_are_open_until_the_last_shutdown(mock_nvml: MockNvml, start: Start, tmp_path: Path) -> None:
    """Looking a GPU up opens its device; as many shutdowns as there were initializations close them all."""
    devices = tmp_path / "devices"
    devices.mkdir()
    nvml = start(gpus=2, devices=str(devices))

    def held() -> set[str]:
        links = (entry.readlink() for entry in Path(f"/proc/{nvml.process.pid}/fd").iterdir())
        return {link.name for link in links if link.parent == devices}

    nvml.ask("nvmlInit()")
    assert held() == {"nvidiactl"}
    nvml.ask("nvmlDeviceGetName(gpu(1))")
    assert held() == {"nvidiactl", "nvidia1"}
    nvml.ask("nvmlShutdown()")
    assert held() == {"nvidiactl", "nvidia1"}  # the process began with an initialization of its own
    nvml.ask("nvmlShutdown()")
    assert held() == set()


def test_pids_of_the_environment_are_dealt(start: Start) -> None:
    """Without a rule the environment's pids go round the GPUs."""
    nvml = start(gpus=2, pids="5,6,7", procs_per_gpu=2)
    lists = [nvml.ask(f"[p.pid for p in nvmlDeviceGetComputeRunningProcesses(gpu({gpu}))]") for gpu in (0, 1)]
    assert lists == [[5, 6], [7, 5]]


def test_each_rewrite_takes_effect_with_the_next_call(mock_nvml: MockNvml, start: Start) -> None:
    """Rules that replace others of the same length at once are not missed."""
    nvml = start(gpus=1)
    for celsius in range(40, 60):
        mock_nvml.clear()
        mock_nvml.set(0, "temp", celsius)
        assert nvml.ask(TEMPERATURE.format(0)) == celsius


def test_gpm_sample_of_two_threads_ends_the_process(mock_nvml: MockNvml, start: Start) -> None:
    """A sample that two threads use ends the process: it would panic a kernel."""
    nvml = start(gpus=1)
    nvml.ask("globals().update(sample=nvmlGpmSampleAlloc(), threading=__import__('threading')) or 0")
    mock_nvml.hang(0, "nvmlGpmSampleGet")
    nvml.ask("threading.Thread(target=nvmlGpmSampleGet, args=(gpu(0), sample), daemon=True).start()")
    wait_until(lambda: mock_nvml.calls().get("nvmlGpmSampleGet"), "the call that hangs")
    nvml.begin("nvmlGpmSampleFree(sample)")
    status, complaints = nvml.end()
    assert status != 0
    assert "a GPM sample used by two threads at once: nvmlGpmSampleFree" in complaints


def test_gpm_sample_that_was_freed_ends_the_process(start: Start) -> None:
    """Nor can the use of memory that was given back."""
    nvml = start(gpus=1)
    nvml.ask("globals().update(sample=nvmlGpmSampleAlloc()) or nvmlGpmSampleFree(sample)")
    nvml.begin("nvmlGpmSampleGet(gpu(0), sample)")
    status, complaints = nvml.end()
    assert status != 0
    assert "no GPM sample, or one that was freed: nvmlGpmSampleGet" in complaints


def test_calls_of_all_processes_are_counted(mock_nvml: MockNvml, start: Start) -> None:
    """Counts are kept by function and add up over the processes."""
    first, second = start(), start()
    for nvml in (first, first, second):
        nvml.ask("nvmlDeviceGetCount()")
    assert mock_nvml.calls() == {"nvmlInit_v2": 2, "nvmlDeviceGetCount_v2": 3}


@pytest.mark.parametrize(
    "line",
    ["eror 0 * UNKNOWN", "error 0 * NO_SUCH_CODE", "error 999 * UNKNOWN", "set 0 temperature 5", "set 0 temp warm",
     "hang", "delay 0 nvmlInit_v2", "procs 0 12", "graphics 0 12:many", "xid 1 * 79",
     "mig 0 9g.90gb", "mig 0 1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb"],
)  # fmt: skip
def test_wrong_control_line_ends_the_process(mock_nvml: MockNvml, start: Start, line: str) -> None:
    """A mistake in a test's own rules is reported."""
    nvml = start()
    mock_nvml.control(line)
    nvml.begin("nvmlDeviceGetCount()")
    status, complaints = nvml.end()
    assert status != 0
    assert f"mock nvml: bad control line: {line}" in complaints


def test_wrong_setting_ends_the_process(start: Start) -> None:
    """A model that does not exist is refused when the library is loaded."""
    nvml = start(init=False, model="h1000")
    nvml.begin("nvmlInit()")
    assert "mock nvml: MOCK_NVML_MODEL: h1000" in nvml.end()[1]


def test_unknown_setting_is_refused(mock_nvml: MockNvml) -> None:
    """A setting that the library would not read raises where it is used."""
    with pytest.raises(ValueError, match="no such setting of the mock: gpu"):
        mock_nvml.env(gpu=3)
