"""Incidents of GPUs and of the daemon, on a host whose other GPU keeps training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from faulty_simulation import FaultyGpu
from jobs import Act, Ending, Job
from pynvml import NVML_ERROR_DRIVER_NOT_LOADED  # noqa: TID251 - a return code; nothing is called
from scenes import DURATION_SECONDS, HOUR, WELL, Event, Scene, incident, make_steps, make_training, schedule
from scripted_box import Answer, WatchedBox

from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import CLOCK_EVENT_REASONS, ECC_LIFETIMES, ECC_TYPES, MEMORY_LOCATIONS, RECOVERY_ACTIONS

OVER = WELL + 600.0  # when something is over again
ABORTED = Ending(None, 6)
_REASONS = "nvmlDeviceGetCurrentClocksEventReasons"
_ERRORS = "nvmlDeviceGetMemoryErrorCounter"


def _busy(*events: tuple[float, Event], ending: float | None = None) -> Scene:
    """Return a scene of two GPUs that train; the run on the first aborts after `ending` seconds of trouble."""
    first = (
        make_training(WELL + ending, ending=ABORTED) if ending is not None else make_training(DURATION_SECONDS + HOUR)
    )
    return Scene(DURATION_SECONDS, (first, make_training(DURATION_SECONDS + HOUR, gpus=(1,), uid=1001)), events)


def _gpu(act: Callable[[WatchedBox], object]) -> tuple[float, Event]:
    return schedule(WELL, act)


def _answer(function: str, answer: Answer) -> tuple[float, Event]:
    return schedule(WELL, lambda watched: watched.box.script(0, function, answer))


def _field(number: int, value: float, begin: float = WELL) -> tuple[float, Event]:
    return schedule(begin, lambda watched: watched.box.script_field(0, number, lambda _scope: value))


def _xid(code: int, after: float = 0.0) -> tuple[float, Event]:
    return schedule(WELL + after, lambda watched: watched.box.log_xid(0, code))


def _reasons(*names: str) -> tuple[float, Event]:
    return _answer(_REASONS, lambda _slot: sum(CLOCK_EVENT_REASONS[name] for name in names))


def _uncorrectable(gpu: FaultyGpu, kind: int, lifetime: int, location: int) -> int:
    known: int = gpu.usual(_ERRORS, kind, lifetime, location)
    counter = (ECC_TYPES["uncorrected"], MEMORY_LOCATIONS["dram"])
    return known + ((kind, location) == counter and lifetime in ECC_LIFETIMES.values())


def _hot(watched: WatchedBox, celsius: float) -> None:
    watched.box.boards[0].pinned = celsius


def _blocked(watched: WatchedBox, cooling: float) -> None:
    watched.box.boards[0].block_cooling(cooling)


def _fans(second: int) -> Answer:
    return lambda _slot, fan: (60, second)[fan]


def _link(number: int, value: Callable[[WatchedBox], float], link: int) -> tuple[float, Event]:
    """Let one NVLink of the first GPU answer differently from its 17 others."""

    def happen(watched: WatchedBox) -> None:
        gpu = watched.box.gpu(0)

        def answer(scope: int) -> float | None:
            if scope == link:
                return value(watched)
            ((_code, usual),) = gpu.usual("nvmlDeviceGetFieldValues", [(number, scope)])
            return cast("float | None", usual)

        watched.box.script_field(0, number, answer)

    return schedule(WELL, happen)


def _errors_of_link(watched: WatchedBox) -> float:
    return 1 + int((watched.now - WELL) / 6)  # ten a minute


def _lose(watched: WatchedBox, index: int = 0) -> None:
    watched.box.gpu(index).lose()


def _set(name: str, *, value: bool) -> Event:
    return lambda watched: setattr(watched, name, value)


def _restore(watched: WatchedBox) -> None:
    watched.down = False
    watched.restart()


def _driver_gone(watched: WatchedBox) -> None:
    watched.box.driver.lose(NVML_ERROR_DRIVER_NOT_LOADED)


INCIDENTS = (
    incident("near thermal", "the air is so warm that a busy GPU stays 4 °C below its slowdown",
        lambda: _busy(_gpu(partial(_hot, celsius=85))), "GpuNearThermalSlowdown"),
    incident("software slowdown", "a filter is blocked: the driver holds a GPU at its highest operating temperature",
        lambda: _busy(_gpu(partial(_blocked, cooling=0.5))), "GpuNearThermalSlowdown", "GpuSoftwareThermalSlowdown"),
    incident("hardware slowdown", "the chassis' fans stop: a GPU is at its slowdown temperature",
        lambda: _busy(_gpu(partial(_blocked, cooling=0.5)), _gpu(partial(_hot, celsius=89))),
        "GpuHardwareThermalSlowdown", "GpuNearThermalSlowdown", "GpuSoftwareThermalSlowdown"),
    incident("external overheating", "a sensor next to a GPU asks it to slow down; its die is cool",
        lambda: _busy(_reasons("hw_slowdown", "hw_thermal_slowdown")), "GpuHardwareThermalSlowdown"),
    incident("power brake", "the machine's power supply asks a GPU to slow down",
        lambda: _busy(_reasons("hw_slowdown", "hw_power_brake_slowdown")), "GpuPowerBrake"),
    incident("fan failure", "a fan of a GPU that has its own stands still, and it gets hot",
        lambda: _busy(
            schedule(0, lambda watched: watched.box.script(0, "nvmlDeviceGetNumFans", lambda _slot: 2)),
            schedule(0, lambda watched: watched.box.script(0, "nvmlDeviceGetFanSpeed_v2", _fans(60))),
            _answer("nvmlDeviceGetFanSpeed_v2", _fans(0)),
            schedule(WELL + 60, partial(_hot, celsius=86)),
        ), "GpuFanStopped", "GpuNearThermalSlowdown"),
    incident("hot memory", "a GPU's memory is 1 °C above its highest operating temperature; its die is cool",
        lambda: _busy(_field(fields.MEMORY_TEMPERATURE, 96)), "GpuMemoryNearThermalSlowdown"),
    incident("lost GPU", "XID 79, and the GPU does not answer; the run on it aborts",
        lambda: _busy(_xid(79), _gpu(_lose), ending=10), "RunDied", "GpuDown", "GpuXidCritical"),
    incident("XID 48", "XID 48, an uncorrectable memory error is counted, and the run on it aborts",
        lambda: _busy(_xid(48), _answer(_ERRORS, _uncorrectable), ending=10),
        "RunDied", "GpuUncorrectedMemoryErrors", "GpuXidCritical"),
    incident("XID 63", "XID 63, and a row waits to be replaced",
        lambda: _busy(_xid(63), _field(fields.ROW_REMAP_PENDING, 1)), "GpuRowRemapPending", "GpuXidWarning"),
    incident("XID 64", "XID 64, and the replacement of a row failed",
        lambda: _busy(_xid(64), _field(fields.ROW_REMAP_FAILED, 1)), "GpuRowRemapFailed", "GpuXidCritical"),
    incident("XID 13", "XID 13, twice: the fault of a program, which does not report",
        lambda: Scene(DURATION_SECONDS, (make_training(DURATION_SECONDS + HOUR, name=""),), (_xid(13), _xid(13, 300)))),
    incident("uncorrectable ECC", "an uncorrectable memory error is counted, and no XID is seen",
        lambda: _busy(_answer(_ERRORS, _uncorrectable)), "GpuUncorrectedMemoryErrors"),
    incident("row remap pending", "a row waits to be replaced, and no XID is seen",
        lambda: _busy(_field(fields.ROW_REMAP_PENDING, 1)), "GpuRowRemapPending"),
    incident("row remap failed", "a row could not be replaced, and no XID is seen",
        lambda: _busy(_field(fields.ROW_REMAP_FAILED, 1)), "GpuRowRemapFailed"),
    incident("page retirement pending", "a page of an older GPU waits to be retired",
        lambda: _busy(
            _field(fields.RETIRED_PAGES_PENDING, 0, begin=0), _field(fields.RETIRED_PAGES_PENDING, 1)
        ), "GpuRetiredPagesPending"),
    incident("recovery action", "the driver asks for a reset of a GPU, and no XID is seen",
        lambda: _busy(_field(fields.RECOVERY_ACTION, RECOVERY_ACTIONS["gpu_reset"])), "GpuRecoveryNeeded"),
    incident("PCIe degraded", "the link of a busy GPU comes up with 4 of 16 lanes, and of generation 1 of 5",
        lambda: _busy(
            _answer("nvmlDeviceGetCurrPcieLinkWidth", lambda _slot: 4),
            _answer("nvmlDeviceGetCurrPcieLinkGeneration", lambda _slot: 1),
        ), "GpuPcieLinkDegraded"),
    incident("NVLink down", "one of 18 links of a GPU goes down",
        lambda: _busy(_link(fields.NVLINK_STATE, lambda _watched: 0, 7)), "GpuNvlinkDown"),
    incident("NVLink errors", "one link of a GPU replays, and recovers, again and again",
        lambda: _busy(
            _link(fields.NVLINK_ERRORS["replay"], _errors_of_link, 3),
            _link(fields.NVLINK_ERRORS["recovery"], _errors_of_link, 3),
        ), "GpuNvlinkErrors"),
    incident("daemon down", "the daemon is stopped for ten minutes",
        lambda: _busy(schedule(WELL, _set("down", value=True)), schedule(OVER, _restore)), "GpuwardenDown"),
    incident("poll stale", "the daemon serves the same page for ten minutes",
        lambda: _busy(schedule(WELL, _set("hung", value=True)), schedule(OVER, _set("hung", value=False))),
        "GpuwardenStale"),
    incident("driver gone", "the driver does not answer for ten minutes; the runs go on",
        lambda: _busy(schedule(WELL, _driver_gone), schedule(OVER, lambda watched: watched.box.driver.restore())),
        "GpuwardenDriverFault"),
    incident("GPU unreadable from the start", "the driver counts two GPUs, one of which has never answered",
        lambda: Scene(
            DURATION_SECONDS,
            (make_training(DURATION_SECONDS + HOUR),),
            (schedule(0, partial(_lose, index=1)),),
            begin=0,
        ), "GpuDown"),
    incident("forgotten notebook", "a notebook holds a GPU over a night and does nothing",
        lambda: Scene(
            6 * HOUR, (Job(0, (Act(10), make_steps(WELL, memory=(11e9, 11e9)), Act(24 * HOUR)), uid=1002),), begin=WELL
        ), "GpuAllocatedButIdle"),
)  # fmt: skip
