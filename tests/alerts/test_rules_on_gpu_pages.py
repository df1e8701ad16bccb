"""The alerts on GPUs, on pages that the real daemon made of a simulated box whose GPUs break, and of captures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rule_pages import Episode, captured, episodes, simulated

from gpuwarden.config.value_types import DURATION
from gpuwarden.health.conditions import ALERTS
from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import CLOCK_EVENT_REASONS, FABRIC_STATES, RECOVERY_ACTIONS
from gpuwarden.simulation.answers import SimulatedGpu, compute_answer
from gpuwarden.simulation.simulated_nvml import Simulation

pytestmark = pytest.mark.system

GOLDENS = Path(__file__).parents[1] / "goldens"
BROKEN, MENDED, SECONDS = 120.0, 900.0, 1700.0  # when all faults begin and end, and how long the box is watched
STEP = 5.0  # seconds between polls and evaluations
AT_ONCE = 15 + STEP  # seconds until the slow tier and an evaluation have seen it
# Seconds after its begin within which a fault is told of, and after its end within which no more: by the rule's hold,
# and its window, of which all or a part must be bad.
FLAG, HELD, SLOWED, LINK = (AT_ONCE, AT_ONCE), (60 + AT_ONCE, AT_ONCE), (60.0, 300.0), (600 + AT_ONCE, AT_ONCE)
RATE = 300.0, 600.0
JOINING = 300 + AT_ONCE, AT_ONCE
# The workloads of the box: ResNet, a leaking U-Net, a ViT on two GPUs at their power limit, BERT on a board with a bad
# air flow, tabular data, a forgotten notebook, nothing.
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
LASTING = {"GpuUncorrectedMemoryErrors"}  # told of for an hour


def altered(gpu: SimulatedGpu, function: str, **values: int) -> SimpleNamespace:
    """Return the struct that a GPU answers with, with other values in it."""
    return SimpleNamespace(**{**vars(compute_answer(gpu, function)), **values})


def breaks(index: int, gpu: SimulatedGpu, seconds: float) -> None:
    """Break a GPU as EXPECTED has it; `seconds` are those since the begin, for what counts."""
    if index == RESNET:
        gpu.set_answer("nvmlDeviceGetCurrPcieLinkGeneration", 3)
        gpu.set_answer(_FABRIC, altered(gpu, _FABRIC, state=FABRIC_STATES["in_progress"]))
    elif index == UNET:
        for flag in (fields.ROW_REMAP_PENDING, fields.ROW_REMAP_FAILED, fields.RETIRED_PAGES_PENDING):
            gpu.set_field(flag, 1)
        gpu.set_field(fields.RETIRED_PAGES["single_bit"], 62)
        gpu.set_field(fields.RECOVERY_ACTION, RECOVERY_ACTIONS["gpu_reset"])
        gpu.set_field(fields.PCIE_REPLAYS, seconds)
        gpu.set_answer(_ROWS, altered(gpu, _ROWS, max=2559, none=1))
        gpu.set_answer("nvmlDeviceGetUnrepairableMemoryFlag_v1", 1)
        gpu.set_answer(_SRAM, altered(gpu, _SRAM, bThresholdExceeded=1))
        gpu.set_answer("nvmlDeviceGetRepairStatus", [1, 0])
        gpu.set_answer("nvmlDeviceGetMemoryErrorCounter", 2)
    elif index == VIT:
        gpu.set_field(fields.NVLINK_STATE, 0, scope=4)
        gpu.set_field(fields.NVLINK_ERRORS["replay"], seconds, scope=5)
    elif index == VIT_2:
        gpu.set_field(fields.MEMORY_TEMPERATURE, 93)
        gpu.set_field(fields.RECOVERY_ACTION, RECOVERY_ACTIONS["drain_and_reset"])
        gpu.set_answer(_FABRIC, altered(gpu, _FABRIC, healthMask=0b10101001))
    elif index == TABULAR:
        gpu.pin(temperature=90)
    elif index == NOTEBOOK:
        gpu.pin(temperature=78)
        gpu.set_answer("nvmlDeviceGetCurrentClocksEventReasons", CLOCK_EVENT_REASONS["hw_power_brake_slowdown"])


def looks_alike(index: int, gpu: SimulatedGpu) -> None:
    """Give a GPU what looks like a fault and is none."""
    gpu.set_field(fields.NVLINK_STATE, 0, scope=17)  # without a partner
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


def act(simulation: Simulation, now: float) -> None:
    """Break and mend the box."""
    for index in range(8):
        gpu = simulation.gpu(index)
        if now == MENDED:
            gpu.restore()
            gpu.unpin()
        looks_alike(index, gpu)
        if BROKEN <= now < MENDED:
            breaks(index, gpu, now - BROKEN)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Episode]:
    """Return what fired of GPUs."""
    found = episodes(simulated(SECONDS, act), tmp_path_factory.mktemp("rules"), every=STEP)
    return [each for each in found if each.alert.startswith("Gpu")]


def of(told: list[Episode], index: int) -> Iterator[Episode]:
    """Give the alerts about a GPU."""
    return (each for each in told if each.labels.get("gpu") == str(index))


def test_broken_gpus_are_told_of_in_time(told: list[Episode]) -> None:
    """Each fault fires its own alert, once, soon after its begin, until soon after its end; and no others fire."""
    for index, expected in EXPECTED.items():
        fired = [each for each in of(told, index) if each.alert not in LASTING]
        found = {each.alert: each for each in fired}
        assert len(found) == len(fired)
        assert set(found) == set(expected), index
        for alert, (late, lingers) in expected.items():
            assert BROKEN <= found[alert].begin <= BROKEN + late, found[alert]
            kept = DURATION.read(ALERTS[alert].keep_firing_for or "0")
            assert MENDED - STEP <= found[alert].end - kept <= MENDED + lingers, found[alert]


def test_new_memory_errors_are_told_of_by_place(told: list[Episode]) -> None:
    """Of each place that has them, from soon after they came, for longer than the box is watched."""
    found = [each for each in told if each.alert in LASTING]
    assert {each.labels["gpu"] for each in found} == {str(UNET)}
    assert sorted(each.labels["location"] for each in found) == ["dram", "sram"]
    for each in found:
        assert each.begin <= BROKEN + AT_ONCE
        assert each.end == SECONDS


def test_hot_board_is_told_of(told: list[Episode]) -> None:
    """The one with the bad air flow, which the driver slows down for long, and nothing else of it."""
    assert {each.alert for each in of(told, BERT)} == {"GpuNearThermalSlowdown", "GpuSoftwareThermalSlowdown"}


def test_what_looks_like_a_fault_fires_nothing(told: list[Episode]) -> None:
    """A slow link, stopped fans and a history of errors on an idle GPU."""
    assert list(of(told, IDLE)) == []


def test_lost_gpu_is_told_of_until_it_is_back(tmp_path: Path) -> None:
    """Once, by its name, though it has no readings any more, and the other GPU is well."""

    def lose(simulation: Simulation, now: float) -> None:
        if now == 60:
            simulation.gpu(1).lose()
        if now == 120:
            simulation.gpu(1).restore()

    told = episodes(simulated(300, lose, gpus=2), tmp_path)
    (down,) = (each for each in told if each.alert.startswith("Gpu"))
    assert (down.alert, down.labels["gpu"], down.labels["severity"]) == ("GpuDown", "1", "critical")
    assert 90 <= down.begin <= 100
    assert 110 <= down.end - DURATION.read(ALERTS["GpuDown"].keep_firing_for) <= 125


def test_captured_box_with_a_gpu_that_never_says_who_it_is(tmp_path: Path) -> None:
    """That one is missing; what fails now and then on the others for a poll is not worth an alert."""
    assert {each.alert for each in episodes(captured(GOLDENS / "broken.json", 120), tmp_path)} == {"GpuMissing"}


def test_captured_boxes_are_well(tmp_path: Path) -> None:
    """Boards of all kinds, a real one among them, fire nothing, whatever they do not tell."""
    for box in ("h100", "h200", "rtx4090", "gb10", "mig", "r470", "first"):
        found = episodes(captured(GOLDENS / f"{box}.json", 8 * 60), tmp_path, every=20)
        assert [str(each) for each in found] == [], box
