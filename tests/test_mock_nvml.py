"""The mock library, asked through the real nvidia-ml-py in a process of its own."""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import pytest
from services import until

from mock_nvml import MockNvml

pytest_plugins = ["pytester"]

CLIENT = Path(__file__).parent / "mock_nvml" / "client.py"
DEADLINE_S = 30
MIB = 1 << 20
TEMPERATURE = "nvmlDeviceGetTemperature(gpu({}), 0)"


class NvmlError(Exception):
    """What the binding raised, without NVMLError_."""


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
        """Wait for the answer to what was begun."""
        return bool(select.select([self.answers], [], [], seconds)[0])

    def finish(self) -> Any:
        """Return the answer to what was begun, or raise NvmlError."""
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


def build_elsewhere(directory: Path) -> subprocess.Popen[str]:
    """Build the library in another process."""
    tests = str(Path(__file__).parent)
    return subprocess.Popen(
        [sys.executable, "-m", "mock_nvml", directory],
        env={**os.environ, "PYTHONPATH": tests},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_until_called(mock_nvml: MockNvml, function: str) -> None:
    """Return once a call of the function has begun."""
    poll = threading.Event()
    for _ in range(DEADLINE_S * 100):
        if function in mock_nvml.calls():
            return
        poll.wait(0.01)
    pytest.fail(f"{function} was not called")


def test_processes_that_build_at_once_share_the_result(mock_nvml_library: Path, tmp_path: Path) -> None:
    """Each of several builds into one folder gives the one library, and nothing else stays there."""
    builders = [build_elsewhere(tmp_path / "cache") for _ in range(3)]
    answers = {builder.communicate(timeout=DEADLINE_S)[0].strip() for builder in builders}
    assert [str(folder) for folder in (tmp_path / "cache").iterdir()] == list(answers)
    assert Path(*answers, "libnvidia-ml.so.1").read_bytes() == (mock_nvml_library / "libnvidia-ml.so.1").read_bytes()


@pytest.mark.parametrize(("ci", "outcome"), [("", {"skipped": 1}), ("true", {"errors": 1})])
def test_machine_without_compiler_skips_except_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, outcome: dict[str, int]
) -> None:
    """Either way the outcome tells what to install."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pytester.makepyfile("pytest_plugins = ['mock_nvml.fixtures']\ndef test_needing_it(mock_nvml): pass")
    ran = pytester.runpytest_subprocess("-rs", timeout=DEADLINE_S)
    ran.assert_outcomes(**outcome)
    ran.stdout.fnmatch_lines(["*apt-get install gcc libc6-dev*"])


def test_initialization_fails_as_told(mock_nvml: MockNvml, start: Start) -> None:
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


def test_lost_gpu_spares_the_others(mock_nvml: MockNvml, start: Start) -> None:
    """A lost GPU can be neither read nor looked up, and its neighbours answer."""
    nvml = start()
    nvml.ask("globals().update(held=gpu(3), uuid=nvmlDeviceGetUUID(gpu(3)), bus=nvmlDeviceGetPciInfo(gpu(3)).busId)")
    mock_nvml.lose(3)
    assert nvml.error("nvmlDeviceGetTemperature(held, 0)") == "GpuIsLost"
    assert nvml.error("nvmlDeviceGetHandleByIndex(3)") == "GpuIsLost"
    assert nvml.error("nvmlDeviceGetHandleByUUID(uuid)") == "GpuIsLost"
    assert nvml.error("nvmlDeviceGetHandleByPciBusId(bus)") == "GpuIsLost"
    assert [nvml.ask(f"nvmlDeviceGetIndex(gpu({other}))") for other in (2, 4)] == [2, 4]


def test_function_is_unsupported_as_told(mock_nvml: MockNvml, start: Start) -> None:
    """A rule for one function leaves the others alone; a prefix takes in all that begin with it."""
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
    """What driver 590 does not export is missing from the library."""
    nvml = start(gpus=1)
    assert nvml.error("pynvml._nvmlGetFunctionPointer('nvmlSystemGetCPER_v1')") == "FunctionNotFound"


def test_error_with_a_probability_fails_sometimes(mock_nvml: MockNvml, start: Start) -> None:
    """Of many calls that fail every second time, some fail; some do not."""
    nvml = start(gpus=1)
    mock_nvml.error("*", "nvmlSystemGetDriverVersion", "UNKNOWN", probability=0.5)
    outcomes = set()
    for _ in range(64):
        nvml.begin("nvmlSystemGetDriverVersion()")
        try:
            outcomes.add(nvml.finish())
        except NvmlError as error:
            outcomes.add(str(error))
    assert outcomes == {"590.48.01", "Unknown"}


@pytest.mark.parametrize(
    ("key", "value", "expression", "expected"),
    [
        ("util", 37, "nvmlDeviceGetUtilizationRates(gpu(1)).gpu", 37),
        ("temp", 91, TEMPERATURE.format(1), 91),
        ("power", 321.5, "nvmlDeviceGetPowerUsage(gpu(1))", 321_500),
        ("energy", 12_345, "nvmlDeviceGetTotalEnergyConsumption(gpu(1))", 12_345),
        ("memused", 1000, "nvmlDeviceGetMemoryInfo(gpu(1), version=nvmlMemory_v2).used", 1000 * MIB),
        ("free", 77, "nvmlDeviceGetMemoryInfo(gpu(1), version=nvmlMemory_v2).free", 77 * MIB),
        ("free", 77, "nvmlDeviceGetMemoryInfo(gpu(1)).free", 77 * MIB),
        ("limit", 500_000, "nvmlDeviceGetEnforcedPowerLimit(gpu(1))", 500_000),
        ("pstate", 8, "nvmlDeviceGetPerformanceState(gpu(1))", 8),
        ("throttle", 0x48, "nvmlDeviceGetCurrentClocksEventReasons(gpu(1))", 0x48),
        ("ecc_sbe", 5, "nvmlDeviceGetTotalEccErrors(gpu(1), NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_VOLATILE_ECC)", 5),
        (
            "ecc_dbe",
            5,
            "nvmlDeviceGetTotalEccErrors(gpu(1), NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_AGGREGATE_ECC)",
            10,
        ),
        ("remap_cor", 1, "nvmlDeviceGetRemappedRows(gpu(1))", [1, 0, 0, 0]),
        ("remap_unc", 2, "nvmlDeviceGetRemappedRows(gpu(1))", [0, 2, 0, 0]),
        ("remap_pending", 1, "nvmlDeviceGetRemappedRows(gpu(1))", [0, 0, 1, 0]),
        ("remap_failed", 1, "fields(1, NVML_FI_DEV_REMAPPED_FAILURE)", [1]),
        ("pcie_gen", 3, "nvmlDeviceGetCurrPcieLinkGeneration(gpu(1))", 3),
        ("pcie_width", 8, "nvmlDeviceGetCurrPcieLinkWidth(gpu(1))", 8),
        ("pcie_replay", 4, "fields(1, NVML_FI_DEV_PCIE_REPLAY_COUNTER)", [4]),
        ("nvlink_down", 2, "[nvmlDeviceGetNvLinkState(gpu(1), link) for link in range(4)]", [1, 1, 0, 1]),
        ("nvlink_errors", 6, "nvmlDeviceGetNvLinkErrorCounter(gpu(1), 0, 0)", 6),
        ("recovery", 2, "fields(1, 230)", [2]),
    ],
)
def test_setting_steers_its_reading(  # noqa: PLR0917 - a table's columns
    mock_nvml: MockNvml, start: Start, key: Any, value: float, expression: str, expected: object
) -> None:
    """Each key fixes what it names on its GPU, and nothing on the other."""
    nvml = start(gpus=2, frozen=1)
    elsewhere = expression.replace("gpu(1)", "gpu(0)").replace("fields(1", "fields(0")
    before = nvml.ask(elsewhere)
    mock_nvml.set(1, key, value)
    assert nvml.ask(expression) == expected
    assert nvml.ask(elsewhere) == before != expected


def test_gpu_count_changes(mock_nvml: MockNvml, start: Start) -> None:
    """A GPU can leave and another come while processes run."""
    nvml = start()
    mock_nvml.set("*", "count", 7)
    assert nvml.ask("nvmlDeviceGetCount()") == 7
    assert nvml.error("nvmlDeviceGetHandleByIndex(7)") == "InvalidArgument"
    mock_nvml.set("*", "count", 9)
    assert nvml.ask("nvmlDeviceGetIndex(gpu(8))") == 8


def test_driver_changes_its_version(mock_nvml: MockNvml, start: Start) -> None:
    """A driver that was replaced says so."""
    nvml = start()
    assert nvml.ask("nvmlSystemGetDriverVersion()") == "590.48.01"
    mock_nvml.driver("595.10")
    assert nvml.ask("nvmlSystemGetDriverVersion()") == "595.10"


def test_devices_are_open_until_the_last_shutdown(mock_nvml: MockNvml, start: Start, tmp_path: Path) -> None:
    """Looking a GPU up opens its device; as many shutdowns as there were initialisations close them all."""
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
    assert held() == {"nvidiactl", "nvidia1"}  # the process began with an initialisation of its own
    nvml.ask("nvmlShutdown()")
    assert held() == set()


def test_processes_are_shown(mock_nvml: MockNvml, start: Start) -> None:
    """Lists of compute and graphics processes are told apart, memory to the byte or not available."""
    nvml = start(gpus=2, frozen=1)
    mock_nvml.processes(0, {11: 100 * MIB, 12: 12_345, 13: None})
    mock_nvml.graphics(0, {14: 5 * MIB})
    mock_nvml.processes(1, {})
    compute, graphics = "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"
    assert nvml.ask(f"listed({compute}(gpu(0)))") == {"11": 100 * MIB, "12": 12_345, "13": None}
    assert nvml.ask(f"listed({graphics}(gpu(0)))") == {"14": 5 * MIB}
    assert nvml.ask(f"listed({compute}(gpu(1)))") == nvml.ask(f"listed({graphics}(gpu(1)))") == {}
    used = "nvmlDeviceGetMemoryInfo(gpu({}), version=nvmlMemory_v2).used"
    assert nvml.ask(used.format(0)) - nvml.ask(used.format(1)) == 105 * MIB + 12_345


def test_process_samples_leave_idle_processes_out(mock_nvml: MockNvml, start: Start) -> None:
    """Samples tell of all processes but the last; a GPU without processes has none."""
    nvml = start(gpus=2)
    mock_nvml.processes(0, {11: MIB, 12: MIB, 13: MIB})
    assert nvml.ask("[s.pid for s in nvmlDeviceGetProcessUtilization(gpu(0), 0)]") == [11, 12]
    assert nvml.error("nvmlDeviceGetProcessUtilization(gpu(1), 0)") == "NotFound"


def test_pids_of_the_environment_are_dealt(start: Start) -> None:
    """Without a rule the environment's pids go round the GPUs."""
    nvml = start(gpus=2, pids="5,6,7", procs_per_gpu=2)
    lists = [nvml.ask(f"[p.pid for p in nvmlDeviceGetComputeRunningProcesses(gpu({gpu}))]") for gpu in (0, 1)]
    assert lists == [[5, 6], [7, 5]]


def test_hung_gpu_blocks_its_own_calls_until_released(mock_nvml: MockNvml, start: Start) -> None:
    """A call to a hung GPU waits; other GPUs answer; the call goes on when the rule goes."""
    hung, other = start(), start()
    mock_nvml.hang(6)
    hung.begin("nvmlDeviceGetHandleByIndex(6) and 'released'")
    wait_until_called(mock_nvml, "nvmlDeviceGetHandleByIndex_v2")
    assert other.ask("nvmlDeviceGetIndex(gpu(5))") == 5
    assert not hung.answers_within(0.1)
    mock_nvml.clear()
    assert hung.finish() == "released"


@pytest.mark.parametrize(
    ("function", "expression"),
    [
        ("nvmlInit_v2", "nvmlInit()"),
        ("nvmlDeviceGetCount_v2", "nvmlDeviceGetCount()"),
        ("nvmlShutdown", "nvmlShutdown()"),
    ],
)
@pytest.mark.parametrize("everything", [False, True])
def test_calls_that_concern_no_gpu_can_hang(
    mock_nvml: MockNvml, start: Start, function: str, expression: str, *, everything: bool
) -> None:
    """A rule for `*` hangs a call of the system, named or with all others."""
    nvml = start(init=function != "nvmlInit_v2")
    mock_nvml.hang("*", "*" if everything else function)
    nvml.begin(expression)
    wait_until_called(mock_nvml, function)
    assert not nvml.answers_within(0.1)
    mock_nvml.clear()
    assert nvml.finish() == (8 if function == "nvmlDeviceGetCount_v2" else None)


def test_delay_lasts_at_least_as_long_as_told(mock_nvml: MockNvml, start: Start) -> None:
    """A delayed call cannot be faster than its delay."""
    nvml = start(gpus=1)
    mock_nvml.delay(0, "nvmlDeviceGetPcieThroughput", 0.3)
    assert nvml.ask("duration(nvmlDeviceGetPcieThroughput, gpu(0), 0)") >= 0.3


def test_xid_events_arrive_in_order(mock_nvml: MockNvml, start: Start) -> None:
    """An event set sees what happens after it was made, on its GPUs alone, each event once."""
    nvml = start()
    mock_nvml.xid(0, 13)
    nvml.ask("watch_xids(0, 5)")
    assert nvml.error("next_xid(0)") == "Timeout"
    mock_nvml.xid(5, 79)
    mock_nvml.xid(1, 31)
    mock_nvml.xid(0, 94)
    assert nvml.ask(f"next_xid({DEADLINE_S * 1000})") == [5, 79]
    assert nvml.ask(f"next_xid({DEADLINE_S * 1000})") == [0, 94]
    assert nvml.error("next_xid(0)") == "Timeout"


def test_xid_event_ends_a_wait(mock_nvml: MockNvml, start: Start) -> None:
    """A process that already waits for events is given the one that happens meanwhile."""
    nvml = start()
    nvml.ask("watch_xids(2)")
    nvml.begin(f"next_xid({DEADLINE_S * 1000})")
    wait_until_called(mock_nvml, "nvmlEventSetWait_v2")
    mock_nvml.xid(2, 48)
    assert nvml.finish() == [2, 48]


@pytest.mark.parametrize(("before_w", "after_w"), [(0, 1000), (1000, 0)])
def test_energy_is_the_integral_of_the_steered_power(
    mock_nvml: MockNvml, start: Start, before_w: int, after_w: int
) -> None:
    """The counter grows at the old power up to a change and at the new power from there, read or not read between."""
    nvml = start(gpus=1)
    energy = "nvmlDeviceGetTotalEnergyConsumption(gpu(0)) / 1000"
    mock_nvml.set(0, "power", before_w)
    asked = time.monotonic()
    first = nvml.ask(energy)
    answered = time.monotonic()
    time.sleep(0.1)
    changing = time.monotonic()
    mock_nvml.set(0, "power", after_w)
    nvml.ask(TEMPERATURE.format(0))  # the next call is when the change takes effect
    changed = time.monotonic()
    time.sleep(0.3)
    asked_again = time.monotonic()
    last = nvml.ask(energy)
    answered_again = time.monotonic()
    rounding = 0.002  # two readings of whole millijoules
    least = before_w * (changing - answered) + after_w * (asked_again - changed) - rounding
    most = before_w * (changed - asked) + after_w * (answered_again - changing) + rounding
    assert least <= last - first <= most


def test_each_rewrite_takes_effect_with_the_next_call(mock_nvml: MockNvml, start: Start) -> None:
    """Rules that replace others of the same length at once are not missed."""
    nvml = start(gpus=1)
    for celsius in range(40, 60):
        mock_nvml.clear()
        mock_nvml.set(0, "temp", celsius)
        assert nvml.ask(TEMPERATURE.format(0)) == celsius


def test_gpm_metrics_follow_the_utilization(mock_nvml: MockNvml, start: Start) -> None:
    """Two samples give the SM utilization of their GPU."""
    nvml = start(gpus=2)
    mock_nvml.set(1, "util", 40)
    assert nvml.ask("gpm(1, NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_ANY_TENSOR_UTIL)") == [40, 16]


def test_gpm_sample_of_two_threads_ends_the_process(mock_nvml: MockNvml, start: Start) -> None:
    """What panics a kernel cannot pass unseen."""
    nvml = start(gpus=1)
    nvml.ask("globals().update(sample=nvmlGpmSampleAlloc(), threading=__import__('threading')) or 0")
    mock_nvml.hang(0, "nvmlGpmSampleGet")
    nvml.ask("threading.Thread(target=nvmlGpmSampleGet, args=(gpu(0), sample), daemon=True).start()")
    until(lambda: mock_nvml.calls().get("nvmlGpmSampleGet"), "the call that hangs")
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


def test_gpm_of_instances(mock_nvml: MockNvml, start: Start) -> None:
    """A divided GPU is sampled by its GPU instances alone, and an undivided one as a whole."""
    nvml = start(gpus=1, frozen=1)
    assert nvml.error("nvmlGpmMigSampleGet(gpu(0), 7, nvmlGpmSampleAlloc())") == "InvalidArgument"
    mock_nvml.mig(0, "1g.10gb")
    assert nvml.error("gpm(0, 2)") == "NotSupported"
    assert nvml.ask("nvmlGpmMigSampleGet(gpu(0), 7, nvmlGpmSampleAlloc()) and 1") == 1
    assert nvml.error("nvmlGpmMigSampleGet(gpu(0), 8, nvmlGpmSampleAlloc())") == "InvalidArgument"


def test_mig_is_reconfigured(mock_nvml: MockNvml, start: Start) -> None:
    """A handle is that of the instance in its place now; where there is none any more it is invalid."""
    nvml = start(gpus=1)
    mock_nvml.mig(0, "3g.40gb", "1g.10gb", "1g.10gb")
    nvml.ask("globals().update(mig=[nvmlDeviceGetMigDeviceHandleByIndex(gpu(0), i) for i in range(3)]) or 0")
    assert nvml.ask("[nvmlDeviceGetName(d).partition(' MIG ')[2] for d in mig]") == ["3g.40gb", "1g.10gb", "1g.10gb"]
    assert nvml.ask("[nvmlDeviceGetAttributes_v2(d).multiprocessorCount for d in mig]") == [60, 16, 16]
    before = nvml.ask("[nvmlDeviceGetUUID(d) for d in mig]")
    mock_nvml.mig(0, "3g.40gb", generation=1)
    after = nvml.ask("nvmlDeviceGetUUID(mig[0])")
    assert after not in before
    assert nvml.error("nvmlDeviceGetUUID(mig[1])") == "InvalidArgument"
    mock_nvml.undivide(0)
    assert nvml.ask("nvmlDeviceGetMigMode(gpu(0))") == [0, 0]
    assert nvml.error("nvmlDeviceGetUUID(mig[0])") == "InvalidArgument"


def test_mig_divides_each_gpu(start: Start) -> None:
    """With MIG a GPU has instances with identities and memory of their own, and no utilization."""
    nvml = start(gpus=1, mig=2, pids="5,6,7")
    nvml.ask("globals().update(instance=lambda i: nvmlDeviceGetMigDeviceHandleByIndex(gpu(0), i))")
    assert nvml.ask("nvmlDeviceGetMigMode(gpu(0))") == [1, 1]
    assert nvml.error("nvmlDeviceGetUtilizationRates(gpu(0))") == "NotSupported"
    assert nvml.ask("[nvmlDeviceGetGpuInstanceId(instance(i)) for i in (0, 1)]") == [7, 8]
    assert nvml.ask("[nvmlDeviceGetUUID(instance(i))[:4] for i in (0, 1)]") == ["MIG-", "MIG-"]
    assert nvml.ask("[p.pid for p in nvmlDeviceGetComputeRunningProcesses(instance(0))]") == [5, 7]
    whole, part = nvml.ask("[nvmlDeviceGetMemoryInfo(device).total for device in (gpu(0), instance(0))]")
    assert whole == 8 * part
    assert nvml.error("instance(2)") == "NotFound"


def test_handle_is_looked_up_by_uuid(start: Start) -> None:
    """GPUs and MIG instances are found by the UUIDs that they tell."""
    nvml = start(gpus=2, mig=1)
    same = "nvmlDeviceGetUUID(nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID({0}))) == nvmlDeviceGetUUID({0})"
    assert nvml.ask(same.format("gpu(1)"))
    assert nvml.ask(same.format("nvmlDeviceGetMigDeviceHandleByIndex(gpu(1), 0)"))
    assert nvml.error("nvmlDeviceGetHandleByUUID('GPU-none')") == "NotFound"


def test_calls_of_all_processes_are_counted(mock_nvml: MockNvml, start: Start) -> None:
    """Counts are kept by function and add up over the processes."""
    first, second = start(), start()
    for nvml in (first, first, second):
        nvml.ask("nvmlDeviceGetCount()")
    assert mock_nvml.calls() == {"nvmlInit_v2": 2, "nvmlDeviceGetCount_v2": 3}


def test_consumer_card_lacks_what_a_data_center_card_has(start: Start) -> None:
    """The RTX 4090 has fans; no ECC, NVLink, row remapping, serial number, MIG or GPM."""
    nvml = start(gpus=1, model="rtx4090", frozen=1)
    assert nvml.ask("nvmlDeviceGetName(gpu(0))") == "NVIDIA GeForce RTX 4090"
    assert nvml.ask("[nvmlDeviceGetNumFans(gpu(0)), nvmlDeviceGetFanSpeed(gpu(0))]") == [2, 55]
    for call in (
        "nvmlDeviceGetTotalEccErrors(gpu(0), 0, 0)",
        "nvmlDeviceGetNvLinkState(gpu(0), 0)",
        "nvmlDeviceGetRemappedRows(gpu(0))",
        "nvmlDeviceGetSerial(gpu(0))",
        "nvmlDeviceGetMigMode(gpu(0))",
        "gpm(0, 2)",
    ):
        assert nvml.error(call) == "NotSupported", call


def test_gpu_in_a_chip_with_the_cpu_tells_nothing_of_memory(start: Start) -> None:
    """The GB10 shares the machine's memory: no size, no use of it, no sensor; nor does it have power limits or fans."""
    nvml = start(gpus=1, model="gb10", frozen=1)
    assert nvml.ask("nvmlDeviceGetName(gpu(0))") == "NVIDIA GB10"
    for call in (
        "nvmlDeviceGetMemoryInfo(gpu(0))",
        "nvmlDeviceGetMemoryInfo(gpu(0), nvmlMemory_v2)",
        "nvmlDeviceGetBAR1MemoryInfo(gpu(0))",
        "nvmlDeviceGetEnforcedPowerLimit(gpu(0))",
        "nvmlDeviceGetPowerManagementLimitConstraints(gpu(0))",
        "nvmlDeviceGetFanSpeed(gpu(0))",
        "nvmlDeviceGetTotalEccErrors(gpu(0), 0, 0)",
    ):
        assert nvml.error(call) == "NotSupported", call
    assert nvml.ask("fields(0, NVML_FI_DEV_MEMORY_TEMP)") == [0]
    rates = "[nvmlDeviceGetUtilizationRates(gpu(0)).gpu, nvmlDeviceGetUtilizationRates(gpu(0)).memory]"
    assert nvml.ask(rates) == [50, 0]


def test_frozen_values_can_be_named(start: Start) -> None:
    """Frozen, waves stand at their middle and counters at one hour, on every GPU, at every reading."""
    nvml = start(gpus=2, frozen=1)
    reading = """[
        nvmlDeviceGetUtilizationRates(gpu({0})).gpu, nvmlDeviceGetUtilizationRates(gpu({0})).memory,
        nvmlDeviceGetTemperature(gpu({0}), 0), nvmlDeviceGetPowerUsage(gpu({0})),
        nvmlDeviceGetTotalEnergyConsumption(gpu({0})), nvmlDeviceGetMemoryInfo(gpu({0})).used,
        nvmlDeviceGetClockInfo(gpu({0}), NVML_CLOCK_SM), nvmlDeviceGetPcieThroughput(gpu({0}), 0),
        fields({0}, NVML_FI_DEV_PCIE_COUNT_RX_BYTES),
        nvmlDeviceGetViolationStatus(gpu({0}), NVML_PERF_POLICY_POWER).violationTime]""".replace("\n", " ")
    expected = [
        50, 30, 54, 390_000, 390_000 * 3600, (479 + 32) * MIB, 1162, 225_000, [900_000_000 * 3600], 2_000_000 * 3600,
    ]  # fmt: skip
    assert nvml.ask(reading.format(0)) == nvml.ask(reading.format(1)) == nvml.ask(reading.format(0)) == expected


def test_values_move_unless_frozen(start: Start) -> None:
    """The energy counter grows between two readings."""
    nvml = start(gpus=1)
    energy = "nvmlDeviceGetTotalEnergyConsumption(gpu(0))"
    assert nvml.ask(energy) < nvml.ask(energy)


@pytest.mark.parametrize(
    "line",
    ["eror 0 * UNKNOWN", "error 0 * NO_SUCH_CODE", "error 999 * UNKNOWN", "set 0 temperature 5", "set 0 temp warm",
     "hang", "delay 0 nvmlInit_v2", "procs 0 12", "graphics 0 12:many", "xid 1 * 79",
     "mig 0 9g.90gb", "mig 0 1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb"],
)  # fmt: skip
def test_wrong_control_line_ends_the_process(mock_nvml: MockNvml, start: Start, line: str) -> None:
    """A mistake in a test's own rules cannot pass unseen."""
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
    """A setting that the library would not read raises where it is asked for."""
    with pytest.raises(ValueError, match="no such setting of the mock: gpu"):
        mock_nvml.env(gpu=3)
