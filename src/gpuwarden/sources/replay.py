"""A capture that answers as the recorded driver did, in real time and over and over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from pynvml import (  # noqa: TID251 - return codes; nothing is called
    NVML_ERROR_GPU_IS_LOST,
    NVML_ERROR_INVALID_ARGUMENT,
    NVML_ERROR_NOT_FOUND,
    NVML_ERROR_NOT_SUPPORTED,
    NVML_SUCCESS,
)

from gpuwarden.gpu.host_memory import HostMemory, host_memory
from gpuwarden.gpu.nvml import FUNCTIONS, Field, FieldValue, Nvml, nvml_error
from gpuwarden.sources.capture import FIELD_VALUES, FIELDS, LISTS, Answers, Capture, Frame, question
from gpuwarden.sources.eventless import EVENTLESS

_PID_LIMIT = 1 << 22  # the kernel's PID_MAX_LIMIT: no process has a pid above


class CapturedNvml:
    """Replays a capture through `nvml`, from its first frame at the time of making. `clock` gives seconds.

    A recorded pid may belong to somebody else's process here, so pids are moved to above those that Linux hands out.
    """

    def __init__(self, capture: Capture, clock: Callable[[], float] = time.monotonic) -> None:
        self._capture = capture
        self._clock = clock
        self._began = clock()
        self._indices = {
            uuid: index
            for frame in capture.frames
            for index, gpu in enumerate(frame.gpus)
            if isinstance(uuid := gpu.get("nvmlDeviceGetUUID"), str)  # else the GPU did not say
        }
        answering: dict[str, Callable[..., Any]] = {name: partial(self._of_driver, name) for name in FUNCTIONS}
        answering |= {name: partial(self._of_device, name) for name in FUNCTIONS if name.startswith("nvmlDeviceGet")}
        answering |= EVENTLESS  # of the time of recording, none are told
        answering |= {
            "nvmlDeviceGetFieldValues": self._field_values,
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": partial(self._of_driver, "nvmlDeviceGetCount"),
            "nvmlDeviceGetHandleByIndex": self._by_index,
            "nvmlDeviceGetHandleByUUID": self._by_uuid,
        }
        self.nvml = cast("Nvml", SimpleNamespace(**answering))

    def _frame(self) -> Frame:
        frames = self._capture.frames
        return frames[int((self._clock() - self._began) / self._capture.interval) % len(frames)]

    def _of_driver(self, name: str) -> Any:
        return _answer(self._frame().driver, name)

    def host_memory(self) -> HostMemory:
        """Return the recorded machine's memory; this one's where an older capture has none."""
        return self._frame().host or host_memory()

    def _gpu(self, index: int) -> Answers:
        gpus = self._frame().gpus
        if index >= len(gpus):
            raise nvml_error(NVML_ERROR_GPU_IS_LOST)  # the driver did not count it any more
        _let_through(gpus[index].get("nvmlDeviceGetHandleByIndex"))
        return gpus[index]

    def _of_device(self, name: str, index: int, *arguments: int) -> Any:
        return _answer(self._gpu(index), name, *arguments)

    def _field_values(self, index: int, fields: Sequence[Field]) -> list[FieldValue]:
        gpu = self._gpu(index)
        return [_field_value(gpu.get(question(FIELD_VALUES, *field))) for field in fields]

    def _by_index(self, index: int) -> int:
        gpus = self._frame().gpus
        if not 0 <= index < len(gpus):
            raise nvml_error(NVML_ERROR_INVALID_ARGUMENT)
        _let_through(gpus[index].get("nvmlDeviceGetHandleByIndex"))
        return index

    def _by_uuid(self, uuid: str) -> int:
        gpus = self._frame().gpus
        now = (index for index, gpu in enumerate(gpus) if gpu.get("nvmlDeviceGetUUID") == uuid)
        # A GPU that does not say its UUID now has said it in another frame.
        index = next(now, self._indices.get(uuid, len(gpus)))
        if index >= len(gpus):
            raise nvml_error(NVML_ERROR_NOT_FOUND)
        return self._by_index(index)


def _field_value(answer: object) -> FieldValue:
    if isinstance(answer, Mapping):
        return cast("int", answer["error"]), None
    return (NVML_SUCCESS, answer) if isinstance(answer, (int, float)) else (NVML_ERROR_NOT_SUPPORTED, None)


def _answer(answers: Answers, function: str, *arguments: int) -> Any:
    answer = answers.get(question(function, *arguments))
    if answer is None:
        raise nvml_error(NVML_ERROR_NOT_SUPPORTED)
    _let_through(answer)
    if function in LISTS:
        return [_struct(function, entry) for entry in cast("list[Mapping[str, Any]]", answer)]
    return _struct(function, cast("Mapping[str, Any]", answer)) if function in FIELDS else answer


def _let_through(answer: object) -> None:
    if isinstance(answer, Mapping) and "error" in answer:
        raise nvml_error(answer["error"])


def _struct(function: str, fields: Mapping[str, Any]) -> SimpleNamespace:
    struct = SimpleNamespace(**{name: fields.get(name) for name in FIELDS[function]})
    if function in LISTS and struct.pid <= _PID_LIMIT:
        struct.pid += _PID_LIMIT
    return struct
