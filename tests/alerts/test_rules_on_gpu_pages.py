"""GPU alerts on pages of the real daemon: of a simulated host whose GPUs fail, and of captures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from faulty_simulation import FaultyGpu, FaultySimulation
from rule_pages import Episode, evaluate_rules, scrape_capture, scrape_simulation

from gpuwarden.config.value_types import DURATION
from gpuwarden.health.conditions import ALERTS
from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import CLOCK_EVENT_REASONS, FABRIC_STATES, RECOVERY_ACTIONS
from gpuwarden.nvml.identity import UNIDENTIFIED

pytestmark = pytest.mark.system

GOLDENS = Path(__file__).parents[1] / "goldens"
FAULT_START, FAULT_END, SECONDS = 120.0, 900.0, 1700.0  # start and end of all faults, and length of the simulation
STEP = 5.0  # seconds between polls and evaluations
AT_ONCE = 15 + STEP  # seconds until the slow tier and an evaluation have read it
# Seconds after its start within which a fault fires, and after its end within which it resolves: from the rule's `for`
# and its window, of which all or a part must be bad.
FLAG, HELD, SLOWED, LINK = (AT_ONCE, AT_ONCE), (60 + AT_ONCE, AT_ONCE), (60.0, 300.0), (600 + AT_ONCE, AT_ONCE)
RATE = 300.0, 600.0
JOINING = 300 + AT_ONCE, AT_ONCE
# The workloads of the host: ResNet, a leaking U-Net, a ViT on two GPUs at their power limit, BERT on a board with
# blocked air flow, tabular data, an idle notebook, nothing.
RESNET, UNET, VIT, VIT_2, BERT, TABULAR, NOTEBOOK, IDLE = range(8)
EXPECTED = {
    RESNET: {"GpuPcieLinkDegraded": LINK, "GpuFabricNotJoined": JOINING},
    UNET: {
        "GpuRowRemapPending": FLAG,
        "GpuRowRemapFailed": FLAG,
        "GpuSpareRowsUsedUp": FLAG,
        "GpuMemoryUnrepairable": FLAG,
        "GpuSramErrorsExceeded": FLAG,
        "GpuRepairPending": FLAG,
        "GpuRetiredPagesPending": FLAG,
        "GpuManyRetiredPages": FLAG,
        "GpuRecoveryNeeded": FLAG,
        "GpuPcieReplays": RATE,
    },
    VIT: {"GpuNvlinkDown": HELD, "GpuNvlinkErrors": RATE},
    VIT_2: {"GpuMemoryNearThermalSlowdown": HELD, "GpuDrainNeeded": FLAG, "GpuFabricFault": HELD},
    TABULAR: {"GpuHardwareThermalSlowdown": SLOWED, "GpuNearThermalSlowdown": HELD},
    NOTEBOOK: {"GpuFanStopped": HELD, "GpuPowerBrake": SLOWED},
}
_FABRIC = "nvmlDeviceGetGpuFabricInfoV"
_ROWS = "nvmlDeviceGetRowRemapperHistogram"
_SRAM = "nvmlDeviceGetSramEccErrorStatus"
LONG_FIRING = {"GpuUncorrectedMemoryErrors"}  # keeps firing for an hour


def answer_with(gpu: FaultyGpu, function: str, **values: int) -> SimpleNamespace:
    """Return a GPU's struct with some values replaced."""
    return SimpleNamespace(**{**vars(gpu.usual(function)), **values})


def break_gpu(index: int, gpu: FaultyGpu, seconds: float) -> None:
    """Break a GPU as EXPECTED says; `seconds` since the start drive its counters."""
    if index == RESNET:
        gpu.set_answer("nvmlDeviceGetCurrPcieLinkGeneration", 3)
        gpu.set_answer(_FABRIC, answer_with(gpu, _FABRIC, state=FABRIC_STATES["in_progress"]))
    elif index == UNET:
        for flag in (fields.ROW_REMAP_PENDING, fields.ROW_REMAP_FAILED, fields.RETIRED_PAGES_PENDING):
            gpu.set_field(flag, 1)
        gpu.set_field(fields.RETIRED_PAGES["single_bit"], 62)
        gpu.set_field(fields.RECOVERY_ACTION, RECOVERY_ACTIONS["gpu_reset"])
        gpu.set_field(fields.PCIE_REPLAYS, seconds)
        gpu.set_answer(_ROWS, answer_with(gpu, _ROWS, max=2559, none=1))
        gpu.set_answer("nvmlDeviceGetUnrepairableMemoryFlag_v1", 1)
        gpu.set_answer(_SRAM, answer_with(gpu, _SRAM, bThresholdExceeded=1))
        gpu.set_answer("nvmlDeviceGetRepairStatus", [1, 0])
        gpu.set_answer("nvmlDeviceGetMemoryErrorCounter", 2)
    elif index == VIT:
        gpu.set_field(fields.NVLINK_STATE, 0, scope=4)
        gpu.set_field(fields.NVLINK_ERRORS["replay"], seconds, scope=5)
    elif index == VIT_2:
        gpu.set_field(fields.MEMORY_TEMPERATURE, 93)
        gpu.set_field(fields.RECOVERY_ACTION, RECOVERY_ACTIONS["drain_and_reset"])
        gpu.set_answer(_FABRIC, answer_with(gpu, _FABRIC, healthMask=0b10101001))
    elif index == TABULAR:
        gpu.hold_temperature(temperature=90)
    elif index == NOTEBOOK:
        gpu.hold_temperature(temperature=78)
        gpu.set_answer("nvmlDeviceGetCurrentClocksEventReasons", CLOCK_EVENT_REASONS["hw_power_brake_slowdown"])


def imitate_faults(index: int, gpu: FaultyGpu) -> None:
    """Give a GPU states that resemble a fault but are none."""
    gpu.set_field(fields.NVLINK_STATE, 0, scope=17)  # no link partner
    if index in {NOTEBOOK, IDLE}:
        gpu.set_answer("nvmlDeviceGetNumFans", 2)
        gpu.set_answer("nvmlDeviceGetFanSpeed_v2", 0)
    if index == IDLE:
        gpu.set_answer("nvmlDeviceGetCurrPcieLinkGeneration", 1)
        gpu.set_answer("nvmlDeviceGetMemoryErrorCounter", 40)
        gpu.set_field(fields.PCIE_REPLAYS, 90_000)
        gpu.set_field(fields.NVLINK_ERRORS["replay"], 90_000)
        gpu.set_field(fields.CLOCK_EVENT_NANOSECONDS["sw_thermal_slowdown"], 1e15)
        gpu.set_field(fields.REMAPPED_ROWS["uncorrectable"], 4)


def break_and_repair(simulation: FaultySimulation, now: float) -> None:
    """Break and repair the GPUs of the host."""
    for index in range(8):
        gpu = simulation.gpu(index)
        if now == FAULT_END:
            gpu.restore()
            gpu.hold_temperature(None)
        imitate_faults(index, gpu)
        if FAULT_START <= now < FAULT_END:
            break_gpu(index, gpu, now - FAULT_START)


@pytest.fixture(scope="module")
def fired_alerts(tmp_path_factory: pytest.TempPathFactory) -> list[Episode]:
    """Return the GPU alerts that fired."""
    found = evaluate_rules(scrape_simulation(SECONDS, break_and_repair), tmp_path_factory.mktemp("rules"), every=STEP)
    return [each for each in found if each.alert.startswith("Gpu")]


def alerts_of(fired_alerts: list[Episode], index: int) -> Iterator[Episode]:
    """Yield the alerts about a GPU."""
    return (each for each in fired_alerts if each.labels.get("gpu") == str(index))


def test_faults_fire_in_time(fired_alerts: list[Episode]) -> None:
    """Each fault fires exactly its own alert, once, and resolves it soon after its end."""
    for index, expected in EXPECTED.items():
        fired = [each for each in alerts_of(fired_alerts, index) if each.alert not in LONG_FIRING]
        found = {each.alert: each for each in fired}
        assert len(found) == len(fired)
        assert set(found) == set(expected), index
        for alert, (late, lingers) in expected.items():
            assert FAULT_START <= found[alert].begin <= FAULT_START + late, found[alert]
            kept = DURATION.read(ALERTS[alert].keep_firing_for or "0")
            assert FAULT_END - STEP <= found[alert].end - kept <= FAULT_END + lingers, found[alert]


def test_new_memory_errors_fire_by_location(fired_alerts: list[Episode]) -> None:
    """New memory errors fire an alert for each location, for longer than the simulation runs."""
    found = [each for each in fired_alerts if each.alert in LONG_FIRING]
    assert {each.labels["gpu"] for each in found} == {str(UNET)}
    assert sorted(each.labels["location"] for each in found) == ["dram", "sram"]
    for each in found:
        assert each.begin <= FAULT_START + AT_ONCE
        assert each.end == SECONDS


def test_hot_board_fires(fired_alerts: list[Episode]) -> None:
    """The board with blocked air flow fires only the alerts on heat."""
    assert {each.alert for each in alerts_of(fired_alerts, BERT)} == {
        "GpuNearThermalSlowdown",
        "GpuSoftwareThermalSlowdown",
    }


def test_healthy_lookalikes_fire_nothing(fired_alerts: list[Episode]) -> None:
    """A slow link, stopped fans and old errors on an idle GPU fire nothing."""
    assert list(alerts_of(fired_alerts, IDLE)) == []


def test_lost_gpu_fires_until_it_answers(tmp_path: Path) -> None:
    """A lost GPU fires one alert by name, though it has no readings, and the other GPU fires none."""

    def lose(simulation: FaultySimulation, now: float) -> None:
        if now == 60:
            simulation.gpu(1).lose()
        if now == 120:
            simulation.gpu(1).restore()

    fired_alerts = evaluate_rules(scrape_simulation(300, lose, gpus=2), tmp_path)
    (down,) = (each for each in fired_alerts if each.alert.startswith("Gpu"))
    assert (down.alert, down.labels["gpu"], down.labels["severity"]) == ("GpuDown", "1", "critical")
    assert 90 <= down.begin <= 100
    assert 110 <= down.end - DURATION.read(ALERTS["GpuDown"].keep_firing_for) <= 125


def test_captured_host_with_an_unidentified_gpu(tmp_path: Path) -> None:
    """A GPU that never identifies itself is down; single failed polls of the others fire nothing."""
    (down,) = evaluate_rules(scrape_capture(GOLDENS / "broken.json", 120), tmp_path)
    assert (down.alert, down.labels["gpu"], down.labels["name"]) == ("GpuDown", "3", UNIDENTIFIED)


def test_captured_healthy_hosts_fire_nothing(tmp_path: Path) -> None:
    """Boards of all kinds, one of them real, fire nothing, whichever readings they lack."""
    for box in ("h100", "h200", "rtx4090", "gb10", "mig", "r470", "first"):
        found = evaluate_rules(scrape_capture(GOLDENS / f"{box}.json", 8 * 60), tmp_path, every=20)
        assert [str(each) for each in found] == [], box
