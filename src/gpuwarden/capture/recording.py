"""Recorder of a driver's answers to the daemon's own calls, errors included."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import isfinite
from typing import Any, cast

from pynvml import NVML_ERROR_NOT_SUPPORTED  # noqa: TID251 - a return code; nothing is called

from gpuwarden.capture import nvml_stand_ins
from gpuwarden.capture.capture_file import (
    FIELD_VALUES,
    FIELDS,
    GPM_METRICS,
    GPM_SAMPLES,
    LISTS,
    MAX_FRAMES,
    MAX_INTERVAL_SECONDS,
    MIG_HANDLE,
    MIN_INTERVAL_SECONDS,
    NUMBERS,
    Answer,
    Answers,
    Capture,
    Frame,
    Struct,
    format_question,
)
from gpuwarden.gpu.reader import DEFAULT_PLAN, GpuGoneError, GpuReader, Plan
from gpuwarden.host.host_reader import HostMemory, read_host_memory
from gpuwarden.nvml.gpm import MIN_SAMPLE_SECONDS
from gpuwarden.nvml.identity import identify
from gpuwarden.nvml.interface import FUNCTIONS, Handle, Nvml
from gpuwarden.nvml.return_codes import NVMLError, code_of

SAMPLE_SECONDS = 2 * MIN_SAMPLE_SECONDS  # between the two samples of the first frame
_OF_DRIVER = ("nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetCount")


def record(
    nvml: Nvml,
    frames: int,
    interval: float,
    *,
    plan: Plan = DEFAULT_PLAN,
    host_memory: Callable[[], HostMemory] = read_host_memory,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Capture:
    """Record that many frames, `interval` seconds apart, of the readings in `plan`.

    Blocks; raises NVMLError if the driver does not start.
    """
    if not 1 <= frames <= MAX_FRAMES or not MIN_INTERVAL_SECONDS <= interval <= MAX_INTERVAL_SECONDS:
        raise ValueError(
            f"{frames} frames every {interval:g} s: expected 1 to {MAX_FRAMES} frames, {MIN_INTERVAL_SECONDS:g} to "
            f"{MAX_INTERVAL_SECONDS:g} s apart"
        )
    nvml.nvmlInit()
    box = _BoxRecorder(nvml, plan, host_memory, clock)
    try:
        taken = [box.frame()]
        if box.samples:  # GPM compares two samples, and the first frame took only one
            sleep(SAMPLE_SECONDS)
            taken = [box.frame()]
        began = clock()
        while len(taken) < frames:
            sleep(max(0.0, began + len(taken) * interval - clock()))
            taken.append(box.frame())
    finally:
        box.release()
        nvml.nvmlShutdown()
    return Capture(interval, tuple(taken))


class _BoxRecorder:
    """Recorder of all GPUs. Each keeps its reader between frames, as GPM compares two samples."""

    def __init__(
        self, nvml: Nvml, plan: Plan, host_memory: Callable[[], HostMemory], clock: Callable[[], float]
    ) -> None:
        self._nvml = nvml
        self._plan = plan
        self._host_memory = host_memory
        self._clock = clock
        self._gpus: dict[int, _GpuRecorder] = {}

    @property
    def samples(self) -> bool:
        """True if any GPU has a GPM sample."""
        return any(gpu.nvml.samples for gpu in self._gpus.values())

    def release(self) -> None:
        """Release the driver's resources."""
        for gpu in self._gpus.values():
            gpu.reader.release()

    def frame(self) -> Frame:
        """Record one frame."""
        driver: dict[str, Answer] = {}
        for name in _OF_DRIVER:
            with suppress(NVMLError):
                _record_answer(driver, name, (), getattr(self._nvml, name))
        count = driver["nvmlDeviceGetCount"]
        indices = range(count if isinstance(count, int) else 0)
        return Frame(driver, tuple(self._answers(index) for index in indices), self._host_memory())

    def _answers(self, index: int) -> Answers:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        except NVMLError as error:
            return {"nvmlDeviceGetHandleByIndex": {"error": code_of(error)}}
        gpu = self._gpus.get(index) or _GpuRecorder(self._nvml, handle, self._plan, self._clock)
        self._gpus[index] = gpu
        try:
            return gpu.answers(handle, index)
        finally:
            if gpu.gone:
                del self._gpus[index]


class _GpuRecorder:
    """Recorder of one GPU, with the daemon's own reader, which calls the driver through `nvml`."""

    def __init__(self, nvml: Nvml, handle: Handle, plan: Plan, clock: Callable[[], float]) -> None:
        self.nvml = _RecordingNvml(nvml)
        self.reader = GpuReader(cast("Nvml", self.nvml), handle, plan, clock=clock)
        self.gone = False
        self._uuid: Answer | None = None

    def answers(self, handle: Handle, index: int) -> Answers:
        """Make all calls that the daemon makes."""
        answers = self.nvml.begin()
        with suppress(NVMLError):
            identify(cast("Nvml", self.nvml), handle, index)
        before, self._uuid = self._uuid, answers.get("nvmlDeviceGetUUID")
        if before != self._uuid:  # the index is now another GPU's
            self.reader.attach(handle)
        self.reader.reset()
        try:
            self.reader.read()
        except GpuGoneError:
            self.gone = True
            self.reader.release()
        return answers


class _RecordingNvml:
    """NVML that forwards calls and records the answers; those of a MIG instance's handle as the instance's."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._answers: dict[str, Answer] = {}
        self._instances: dict[int, tuple[Handle, dict[str, Answer]]] = {}  # by id() of the handle, which has no hash
        self._sampled: dict[int, tuple[int, ...]] = {}  # GPU instance of a sample, by the sample's id()
        self.samples = False
        for name in FUNCTIONS:
            setattr(self, name, partial(self._ask, name))
        self.nvmlDeviceGetMigDeviceHandleByIndex = self._instance
        self.nvmlGpmSampleAlloc = nvml.nvmlGpmSampleAlloc
        self.nvmlGpmSampleFree = nvml.nvmlGpmSampleFree
        self.nvmlGpmSampleGet = partial(self._sample, "nvmlGpmSampleGet")
        self.nvmlGpmMigSampleGet = partial(self._sample, "nvmlGpmMigSampleGet")
        self.nvmlGpmMetricsGet = self._metrics
        self.c_nvmlGpmMetricsGet_t = nvml_stand_ins.PlainGpmRequest

    def begin(self) -> Answers:
        """Start a frame; return the dict of its answers."""
        self._answers = {}
        # Answers of the last frame's handles belong neither to the GPU nor to an instance of this frame.
        self._instances = {key: (handle, {}) for key, (handle, answers) in self._instances.items() if answers}
        return self._answers

    def _ask(self, name: str, handle: Handle, *arguments: Any) -> Any:
        _, answers = self._instances.get(id(handle), (handle, self._answers))
        return _record_answer(answers, name, arguments, lambda: getattr(self._nvml, name)(handle, *arguments))

    def _instance(self, handle: Handle, index: int) -> Handle:
        asked = format_question(MIG_HANDLE, index)
        try:
            instance = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except NVMLError as error:
            self._answers[asked] = {"error": code_of(error)}
            raise
        answers: dict[str, Answer] = {}
        self._answers[asked] = answers
        self._instances[id(instance)] = instance, answers
        return instance

    def _sample(self, name: str, handle: Handle, *arguments: Any) -> None:
        *instance, sample = arguments
        asked = format_question(name, *instance)
        try:
            getattr(self._nvml, name)(handle, *arguments)
        except NVMLError as error:
            self._answers[asked] = {"error": code_of(error)}
            raise
        self._answers[asked] = 0
        self._sampled[id(sample)] = tuple(instance)
        self.samples = True

    def _metrics(self, request: nvml_stand_ins.PlainGpmRequest) -> None:
        wanted, instance = request.wanted(), self._sampled[id(request.sample2)]
        # If frames are close together, the samples are of an earlier frame: the replay needs them in this one too.
        self._answers.setdefault(format_question(GPM_SAMPLES[len(instance)], *instance), 0)
        real = self._nvml.c_nvmlGpmMetricsGet_t()
        real.version, real.numMetrics = request.version, request.numMetrics
        real.sample1, real.sample2 = request.sample1, request.sample2
        answers = [real.metrics[position] for position in range(len(wanted))]
        for metric, answer in zip(wanted, answers, strict=True):
            answer.metricId = metric.metricId
        try:
            self._nvml.nvmlGpmMetricsGet(real)
        except NVMLError as error:
            for metric in wanted:
                self._answers[format_question(GPM_METRICS, metric.metricId, *instance)] = {"error": code_of(error)}
            raise
        for metric, answer in zip(wanted, answers, strict=True):
            metric.nvmlReturn, metric.value = answer.nvmlReturn, answer.value
            asked = format_question(GPM_METRICS, metric.metricId, *instance)
            if metric.nvmlReturn:
                self._answers[asked] = {"error": metric.nvmlReturn}
            elif isfinite(metric.value):  # JSON has no other numbers, and the daemon ignores them
                self._answers[asked] = metric.value


def _record_answer(answers: dict[str, Answer], name: str, arguments: Sequence[Any], ask: Callable[[], Any]) -> Any:
    try:
        answer = ask()
    except NVMLError as error:
        for asked in _questions(name, arguments):
            answers[asked] = {"error": code_of(error)}
        raise
    if name == FIELD_VALUES:
        for asked, (code, value) in zip(_questions(name, arguments), answer, strict=True):
            if code != NVML_ERROR_NOT_SUPPORTED:  # hundreds of them; a missing answer is replayed as that
                answers[asked] = {"error": code} if code else value
    else:
        (asked,) = _questions(name, arguments)
        answers[asked] = _answer_from_nvml(name, answer)
    return answer


def _questions(name: str, arguments: Sequence[Any]) -> list[str]:
    if name == FIELD_VALUES:
        return [format_question(name, *field) for field in arguments[0]]
    return [format_question(name, *arguments)]


def _answer_from_nvml(function: str, answer: Any) -> Answer:
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
