"""Replay of a capture: the answers of the recorded driver, in real time, in a loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

from pynvml import (  # noqa: TID251 - return codes; nothing is called
    NVML_ERROR_GPU_IS_LOST,
    NVML_ERROR_INVALID_ARGUMENT,
    NVML_ERROR_NOT_FOUND,
    NVML_ERROR_NOT_SUPPORTED,
    NVML_SUCCESS,
)

from gpuwarden.capture import nvml_stand_ins
from gpuwarden.capture.capture_file import (
    FIELD_VALUES,
    FIELDS,
    GPM_METRICS,
    LISTS,
    MIG_HANDLE,
    Answers,
    Capture,
    Frame,
    format_question,
)
from gpuwarden.capture.nvml_stand_ins import UNSUPPORTED_EVENTS
from gpuwarden.host.host_reader import HostMemory, read_host_memory
from gpuwarden.nvml.interface import FUNCTIONS, Field, FieldValue, Nvml
from gpuwarden.nvml.return_codes import nvml_error

Handle: TypeAlias = "int | tuple[int, int]"  # a GPU's index, or that and the index of a MIG instance
_PID_LIMIT = 1 << 22  # the kernel's PID_MAX_LIMIT: no process has a higher pid


class CapturedNvml:
    """Stand-in for NVML that replays a capture from its first frame on. `clock` returns seconds.

    Recorded pids are moved above those that Linux assigns, as they may be other processes on this machine.
    """

    def __init__(self, capture: Capture, clock: Callable[[], float] = time.monotonic) -> None:
        self._capture = capture
        self._clock = clock
        self._began = clock()
        self._indices = {
            uuid: index
            for frame in capture.frames
            for index, gpu in enumerate(frame.gpus)
            if isinstance(uuid := gpu.get("nvmlDeviceGetUUID"), str)  # otherwise the GPU did not answer
        }
        answering: dict[str, Callable[..., Any]] = {name: partial(self._answer_driver, name) for name in FUNCTIONS}
        answering |= {
            name: partial(self._answer_device, name) for name in FUNCTIONS if name.startswith("nvmlDeviceGet")
        }
        answering |= UNSUPPORTED_EVENTS  # a capture has none
        answering |= {
            "nvmlDeviceGetFieldValues": self._field_values,
            MIG_HANDLE: self._instance,
            "nvmlGpmQueryDeviceSupport": partial(self._answer_device, "nvmlGpmQueryDeviceSupport"),
            "nvmlGpmSampleAlloc": SimpleNamespace,
            "nvmlGpmSampleFree": lambda _sample: None,
            "nvmlGpmSampleGet": self._sample,
            "nvmlGpmMigSampleGet": self._instance_sample,
            GPM_METRICS: self._gpm_metrics,
            "c_nvmlGpmMetricsGet_t": nvml_stand_ins.PlainGpmRequest,
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": partial(self._answer_driver, "nvmlDeviceGetCount"),
            "nvmlDeviceGetHandleByIndex": self._find_by_index,
            "nvmlDeviceGetHandleByUUID": self._find_by_uuid,
        }
        self.nvml = cast("Nvml", SimpleNamespace(**answering))

    def _frame(self) -> Frame:
        frames = self._capture.frames
        return frames[int((self._clock() - self._began) / self._capture.interval) % len(frames)]

    def _answer_driver(self, name: str) -> Any:
        return replay_answer(self._frame().driver, name)

    def host_memory(self) -> HostMemory:
        """Return the recorded machine's memory, or this machine's for an older capture without it."""
        return self._frame().host or read_host_memory()

    def _gpu(self, handle: Handle) -> Answers:
        index, *instance = (handle,) if isinstance(handle, int) else handle
        gpus = self._frame().gpus
        if index >= len(gpus):
            raise nvml_error(NVML_ERROR_GPU_IS_LOST)  # the driver no longer listed it
        _raise_recorded_error(gpus[index].get("nvmlDeviceGetHandleByIndex"))
        return replay_answer(gpus[index], MIG_HANDLE, *instance) if instance else gpus[index]

    def _answer_device(self, name: str, handle: Handle, *arguments: int) -> Any:
        return replay_answer(self._gpu(handle), name, *arguments)

    def _instance(self, index: int, number: int) -> Handle:
        self._gpu((index, number))
        return index, number

    def _sample(self, index: int, sample: SimpleNamespace) -> None:
        self._answer_device("nvmlGpmSampleGet", index)
        sample.gpu, sample.instance = index, ()

    def _instance_sample(self, index: int, gpu_instance: int, sample: SimpleNamespace) -> None:
        self._answer_device("nvmlGpmMigSampleGet", index, gpu_instance)
        sample.gpu, sample.instance = index, (gpu_instance,)

    def _gpm_metrics(self, request: nvml_stand_ins.PlainGpmRequest) -> None:
        """Return the metrics recorded in this frame, which were computed from the recorder's samples."""
        sample = request.sample2
        gpu = self._gpu(sample.gpu)
        for metric in request.wanted():
            answer = gpu.get(format_question(GPM_METRICS, metric.metricId, *sample.instance))
            if isinstance(answer, (int, float)):
                metric.nvmlReturn, metric.value = 0, answer
            else:
                metric.nvmlReturn = _code(answer)

    def _field_values(self, handle: Handle, fields: Sequence[Field]) -> list[FieldValue]:
        gpu = self._gpu(handle)
        return [_field_value(gpu.get(format_question(FIELD_VALUES, *field))) for field in fields]

    def _find_by_index(self, index: int) -> int:
        gpus = self._frame().gpus
        if not 0 <= index < len(gpus):
            raise nvml_error(NVML_ERROR_INVALID_ARGUMENT)
        _raise_recorded_error(gpus[index].get("nvmlDeviceGetHandleByIndex"))
        return index

    def _find_by_uuid(self, uuid: str) -> int:
        gpus = self._frame().gpus
        now = (index for index, gpu in enumerate(gpus) if gpu.get("nvmlDeviceGetUUID") == uuid)
        # A GPU without a UUID in this frame may have one in another.
        index = next(now, self._indices.get(uuid, len(gpus)))
        if index >= len(gpus):
            raise nvml_error(NVML_ERROR_NOT_FOUND)
        return self._find_by_index(index)


def _field_value(answer: object) -> FieldValue:
    return (NVML_SUCCESS, answer) if isinstance(answer, (int, float)) else (_code(answer), None)


def _code(answer: object) -> int:
    """Return the return code of an error; a missing answer is "not supported"."""
    return int(answer["error"]) if isinstance(answer, Mapping) else NVML_ERROR_NOT_SUPPORTED


def replay_answer(answers: Answers, function: str, *arguments: int) -> Any:
    """Return a recorded answer. Raises NVMLError for a recorded error, and for a missing answer."""
    answer = answers.get(format_question(function, *arguments))
    if answer is None:
        raise nvml_error(NVML_ERROR_NOT_SUPPORTED)
    _raise_recorded_error(answer)
    if function in LISTS:
        return [_struct(function, entry) for entry in cast("list[Mapping[str, Any]]", answer)]
    return _struct(function, cast("Mapping[str, Any]", answer)) if function in FIELDS else answer


def _raise_recorded_error(answer: object) -> None:
    if isinstance(answer, Mapping) and "error" in answer:
        raise nvml_error(answer["error"])


def _struct(function: str, fields: Mapping[str, Any]) -> SimpleNamespace:
    struct = SimpleNamespace(**{name: fields.get(name) for name in FIELDS[function]})
    if function in LISTS and struct.pid <= _PID_LIMIT:
        struct.pid += _PID_LIMIT
    return struct
