"""Record what a driver answers to the daemon's own questions, errors included."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

from gpuwarden.gpu.nvml import FUNCTIONS, Handle, Nvml, NVMLError, code_of
from gpuwarden.gpu.reader import GpuGoneError, read
from gpuwarden.sources.capture import FIELDS, LISTS, MAX_FRAMES, Answer, Answers, Capture, Frame, Struct, question

_OF_DRIVER = ("nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetCount")
_OF_IDENTITY = (
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetVbiosVersion",
)


def record(
    nvml: Nvml,
    frames: int,
    interval: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Capture:
    """Take that many frames, `interval` seconds apart. Blocks; raises NVMLError where the driver does not start."""
    if not 1 <= frames <= MAX_FRAMES or not 0 < interval < float("inf"):
        raise ValueError(f"{frames} frames every {interval:g} s: want 1 to {MAX_FRAMES} frames, more than 0 s apart")
    nvml.nvmlInit()
    try:
        began = clock()
        taken = [_frame(nvml)]
        while len(taken) < frames:
            sleep(max(0.0, began + len(taken) * interval - clock()))
            taken.append(_frame(nvml))
    finally:
        nvml.nvmlShutdown()
    return Capture(interval, tuple(taken))


def _frame(nvml: Nvml) -> Frame:
    driver: dict[str, Answer] = {}
    for name in _OF_DRIVER:
        with suppress(NVMLError):
            _ask(nvml, driver, name)
    count = driver["nvmlDeviceGetCount"]
    return Frame(driver, tuple(_gpu(nvml, index) for index in range(count if isinstance(count, int) else 0)))


def _gpu(nvml: Nvml, index: int) -> Answers:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except NVMLError as error:
        return {"nvmlDeviceGetHandleByIndex": {"error": code_of(error)}}
    answers: dict[str, Answer] = {}
    listening = _Listening(nvml, answers)
    for name in _OF_IDENTITY:
        with suppress(NVMLError):
            getattr(listening, name)(handle)
    with suppress(GpuGoneError):
        read(cast("Nvml", listening), handle)
    return answers


class _Listening:
    """Passes all functions on and writes down the answers."""

    def __init__(self, nvml: Nvml, answers: dict[str, Answer]) -> None:
        for name in FUNCTIONS:
            setattr(self, name, partial(_ask, nvml, answers, name))


def _ask(
    nvml: Nvml, answers: dict[str, Answer], name: str, handle: Handle | None = None, argument: int | None = None
) -> Any:
    arguments = [each for each in (handle, argument) if each is not None]
    try:
        answer = getattr(nvml, name)(*arguments)
    except NVMLError as error:
        answers[question(name, argument)] = {"error": code_of(error)}
        raise
    answers[question(name, argument)] = _plain(name, answer)
    return answer


def _plain(function: str, answer: Any) -> Answer:
    if function in LISTS:
        return [_fields(function, entry) for entry in answer]
    return _fields(function, answer) if function in FIELDS else cast("Answer", answer)


def _fields(function: str, struct: Any) -> Struct:
    found = {name: getattr(struct, name) for name in FIELDS[function] if hasattr(struct, name)}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}
