"""Record what a driver answers to the daemon's own questions, errors included."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from pynvml import NVML_ERROR_NOT_SUPPORTED  # noqa: TID251 - a return code; nothing is called

from gpuwarden.gpu.host_memory import HostMemory, host_memory
from gpuwarden.gpu.identity import identify
from gpuwarden.gpu.nvml import FUNCTIONS, Field, Handle, Nvml, NVMLError, code_of
from gpuwarden.gpu.reader import GpuGoneError, GpuReader
from gpuwarden.sources.capture import (
    FIELD_VALUES,
    FIELDS,
    LISTS,
    MAX_FRAMES,
    NUMBERS,
    Answer,
    Answers,
    Capture,
    Frame,
    Struct,
    question,
)

_OF_DRIVER = ("nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetCount")


def record(
    nvml: Nvml,
    frames: int,
    interval: float,
    *,
    host_memory: Callable[[], HostMemory] = host_memory,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Capture:
    """Take that many frames, `interval` seconds apart. Blocks; raises NVMLError where the driver does not start."""
    if not 1 <= frames <= MAX_FRAMES or not 0 < interval < float("inf"):
        raise ValueError(f"{frames} frames every {interval:g} s: want 1 to {MAX_FRAMES} frames, more than 0 s apart")
    nvml.nvmlInit()
    try:
        began = clock()
        taken = [_frame(nvml, host_memory)]
        while len(taken) < frames:
            sleep(max(0.0, began + len(taken) * interval - clock()))
            taken.append(_frame(nvml, host_memory))
    finally:
        nvml.nvmlShutdown()
    return Capture(interval, tuple(taken))


def _frame(nvml: Nvml, host_memory: Callable[[], HostMemory]) -> Frame:
    driver: dict[str, Answer] = {}
    for name in _OF_DRIVER:
        with suppress(NVMLError):
            _ask(nvml, driver, name)
    count = driver["nvmlDeviceGetCount"]
    indices = range(count if isinstance(count, int) else 0)
    return Frame(driver, tuple(_gpu(nvml, index) for index in indices), host_memory())


def _gpu(nvml: Nvml, index: int) -> Answers:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except NVMLError as error:
        return {"nvmlDeviceGetHandleByIndex": {"error": code_of(error)}}
    answers: dict[str, Answer] = {}
    listening = _Listening(nvml, answers)
    with suppress(NVMLError):
        identify(cast("Nvml", listening), handle, index)
    with suppress(GpuGoneError):
        GpuReader(cast("Nvml", listening), handle).read()
    return answers


class _Listening:
    """Passes all functions on and writes down the answers."""

    def __init__(self, nvml: Nvml, answers: dict[str, Answer]) -> None:
        for name in FUNCTIONS:
            setattr(self, name, partial(_ask, nvml, answers, name))


def _ask(
    nvml: Nvml, answers: dict[str, Answer], name: str, handle: Handle | None = None, *arguments: int | Sequence[Field]
) -> Any:
    try:
        answer = getattr(nvml, name)(*([] if handle is None else [handle]), *arguments)
    except NVMLError as error:
        for asked in _questions(name, arguments):
            answers[asked] = {"error": code_of(error)}
        raise
    if name == FIELD_VALUES:
        for asked, (code, value) in zip(_questions(name, arguments), answer, strict=True):
            if code != NVML_ERROR_NOT_SUPPORTED:  # hundreds of them; what is not written down is replayed as that
                answers[asked] = {"error": code} if code else value
    else:
        (asked,) = _questions(name, arguments)
        answers[asked] = _plain(name, answer)
    return answer


def _questions(name: str, arguments: Sequence[Any]) -> list[str]:
    if name == FIELD_VALUES:
        return [question(name, *field) for field in arguments[0]]
    return [question(name, *arguments)]


def _plain(function: str, answer: Any) -> Answer:
    if function in LISTS:
        return [_fields(function, entry) for entry in answer]
    if function in NUMBERS:
        return [int(entry) for entry in answer]
    if function in FIELDS:
        return _fields(function, answer)
    return answer.decode(errors="replace") if isinstance(answer, bytes) else cast("Answer", answer)


def _fields(function: str, struct: Any) -> Struct:
    found = {name: getattr(struct, name) for name in FIELDS[function] if hasattr(struct, name)}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}
