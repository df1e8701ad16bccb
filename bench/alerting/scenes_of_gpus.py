"""Incidents of GPUs and of the daemon, on a host whose other GPU keeps training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from jobs import Act, Ending, Job
from pynvml import NVML_ERROR_DRIVER_NOT_LOADED  # noqa: TID251 - a return code; nothing is called
from scenes import WELL, Happening, Scene, at, steps, training
from scripted_box import Answer, WatchedBox

from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import CLOCK_EVENT_REASONS, ECC_LIFETIMES, ECC_TYPES, MEMORY_LOCATIONS, RECOVERY_ACTIONS
from gpuwarden.simulation.answers import SimulatedGpu, compute_answer

HOUR = 3600.0
OVER = 600.0  # seconds until something is over again
LASTS = 2400.0  # of a scene
ABORTED = Ending(None, 6)
_REASONS = "nvmlDeviceGetCurrentClocksEventReasons"
_ERRORS = "nvmlDeviceGetMemoryErrorCounter"


def _busy(*happens: tuple[float, Happening], ending: float | None = None) -> Scene:
    """Return a scene of two GPUs that train; the run on the first aborts after `ending` seconds of trouble."""
    first = training(WELL + ending, ending=ABORTED) if ending is not None else training(LASTS + HOUR)
    return Scene(LASTS, (first, training(LASTS + HOUR, gpus=(1,), uid=1001)), happens)


def _gpu(act: Callable[[WatchedBox], object]) -> tuple[float, Happening]:
    return at(WELL, act)


def _answer(function: str, answer: Answer) -> tuple[float, Happening]:
    return at(WELL, lambda watched: watched.box.script(0, function, answer))


def _field(number: int, value: float, begin: float = WELL) -> tuple[float, Happening]:
    return at(begin, lambda watched: watched.box.script_field(0, number, lambda _scope: value))


def _xid(code: int, after: float = 0.0) -> tuple[float, Happening]:
    return at(WELL + after, lambda watched: watched.box.log_xid(0, code))


def _reasons(*names: str) -> tuple[float, Happening]:
    return _answer(_REASONS, lambda _slot: sum(CLOCK_EVENT_REASONS[name] for name in names))


def _uncorrectable(gpu: SimulatedGpu, kind: int, lifetime: int, location: int) -> int:
    known: int = compute_answer(gpu, _ERRORS, kind, lifetime, location)
    asked = (ECC_TYPES["uncorrected"], MEMORY_LOCATIONS["dram"])
    return known + ((kind, location) == asked and lifetime in ECC_LIFETIMES.values())


def _hot(watched: WatchedBox, celsius: float) -> None:
    watched.box.gpu(0).pin(temperature=celsius)


def _blocked(watched: WatchedBox, cooling: float) -> None:
    watched.box.boards[0].block(cooling)


def _fans(second: int) -> Answer:
    return lambda _slot, fan: (60, second)[fan]


def _link(number: int, value: Callable[[WatchedBox], float], link: int) -> tuple[float, Happening]:
    """Let one NVLink of the first GPU answer differently from its 17 others."""

    def happen(watched: WatchedBox) -> None:
        gpu = watched.box.gpu(0)

        def answer(scope: int) -> float | None:
            if scope == link:
                return value(watched)
            ((_code, usual),) = compute_answer(gpu, "nvmlDeviceGetFieldValues", [(number, scope)])
            return cast("float | None", usual)

        watched.box.script_field(0, number, answer)

    return at(WELL, happen)


def _errors_of_link(watched: WatchedBox) -> float:
    return 1 + int((watched.now - WELL) / 6)  # ten a minute


def _lose(watched: WatchedBox, index: int = 0) -> None:
    watched.box.gpu(index).lose()


def _set(name: str, *, value: bool) -> Happening:
    return lambda watched: setattr(watched, name, value)


def _back(watched: WatchedBox) -> None:
    watched.down = False
    watched.restart()


def _driver_gone(watched: WatchedBox) -> None:
    watched.box.driver.lose(NVML_ERROR_DRIVER_NOT_LOADED)


SCENES: dict[str, Callable[[], Scene]] = {
    "near thermal": lambda: _busy(_gpu(partial(_hot, celsius=85))),
    "software slowdown": lambda: _busy(_gpu(partial(_blocked, cooling=0.5))),
    "hardware slowdown": lambda: _busy(_gpu(partial(_blocked, cooling=0.5)), _gpu(partial(_hot, celsius=89))),
    "external overheating": lambda: _busy(_reasons("hw_slowdown", "hw_thermal_slowdown")),
    "power brake": lambda: _busy(_reasons("hw_slowdown", "hw_power_brake_slowdown")),
    "fan failure": lambda: _busy(
        at(0, lambda watched: watched.box.script(0, "nvmlDeviceGetNumFans", lambda _slot: 2)),
        at(0, lambda watched: watched.box.script(0, "nvmlDeviceGetFanSpeed_v2", _fans(60))),
        _answer("nvmlDeviceGetFanSpeed_v2", _fans(0)),
        at(WELL + 60, partial(_hot, celsius=86)),
    ),
    "hot memory": lambda: _busy(_field(fields.MEMORY_TEMPERATURE, 96)),
    "lost GPU": lambda: _busy(_xid(79), _gpu(_lose), ending=10),
    "XID 48": lambda: _busy(_xid(48), _answer(_ERRORS, _uncorrectable), ending=10),
    "XID 63": lambda: _busy(_xid(63), _field(fields.ROW_REMAP_PENDING, 1)),
    "XID 64": lambda: _busy(_xid(64), _field(fields.ROW_REMAP_FAILED, 1)),
    "XID 13": lambda: Scene(LASTS, (training(LASTS + HOUR, name=""),), (_xid(13), _xid(13, 300))),
    "uncorrectable ECC": lambda: _busy(_answer(_ERRORS, _uncorrectable)),
    "row remap pending": lambda: _busy(_field(fields.ROW_REMAP_PENDING, 1)),
    "row remap failed": lambda: _busy(_field(fields.ROW_REMAP_FAILED, 1)),
    "page retirement pending": lambda: _busy(
        _field(fields.RETIRED_PAGES_PENDING, 0, begin=0), _field(fields.RETIRED_PAGES_PENDING, 1)
    ),
    "recovery action": lambda: _busy(_field(fields.RECOVERY_ACTION, RECOVERY_ACTIONS["gpu_reset"])),
    "PCIe degraded": lambda: _busy(
        _answer("nvmlDeviceGetCurrPcieLinkWidth", lambda _slot: 4),
        _answer("nvmlDeviceGetCurrPcieLinkGeneration", lambda _slot: 1),
    ),
    "NVLink down": lambda: _busy(_link(fields.NVLINK_STATE, lambda _watched: 0, 7)),
    "NVLink errors": lambda: _busy(
        _link(fields.NVLINK_ERRORS["replay"], _errors_of_link, 3),
        _link(fields.NVLINK_ERRORS["recovery"], _errors_of_link, 3),
    ),
    "daemon down": lambda: _busy(at(WELL, _set("down", value=True)), at(WELL + OVER, _back)),
    "poll stale": lambda: _busy(at(WELL, _set("hung", value=True)), at(WELL + OVER, _set("hung", value=False))),
    "driver gone": lambda: _busy(at(WELL, _driver_gone), at(WELL + OVER, lambda watched: watched.box.driver.restore())),
    "GPU unreadable from the start": lambda: Scene(
        LASTS, (training(LASTS + HOUR),), (at(0, partial(_lose, index=1)),), begin=0
    ),
    "forgotten notebook": lambda: Scene(
        6 * HOUR, (Job(0, (Act(10), steps(WELL, memory=(11e9, 11e9)), Act(24 * HOUR)), uid=1002),), begin=WELL
    ),
}
