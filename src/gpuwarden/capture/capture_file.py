"""Capture file: recorded answers of a driver as JSON, to share and replay (docs/engineering/capture.md)."""

from __future__ import annotations

import gzip
import json
import logging
import re
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias, cast

from gpuwarden.formatting import format_fields
from gpuwarden.host.host_reader import HostMemory
from gpuwarden.nvml import interface

log = logging.getLogger(__name__)

FORMAT, VERSION = "gpuwarden-capture", 1
MAX_FRAMES = 600
MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = (
    1e-6,
    1e6,
)  # between frames: beyond, the number of a frame may be invalid
MAX_BYTES = 64 << 20  # of JSON: MAX_FRAMES frames of 8 GPUs with NVLink take 46 MB

# A question is a function's name, with its arguments after the handle in brackets if it has any. An answer is a
# number, a text, a struct's fields, a list of structs or numbers, or {"error": NVML's return code}. Field values are
# queried in batches and recorded one by one: nvmlDeviceGetFieldValues(number,scope); null means no value now. So are
# GPM metrics: nvmlGpmMetricsGet(number), or nvmlGpmMetricsGet(number,gpu_instance) on a divided GPU; a sample is
# recorded as 0. A MIG instance is recorded as the answers of its handle.
Struct: TypeAlias = "Mapping[str, int | str | None]"
Answer: TypeAlias = "float | str | Struct | Sequence[Struct | int] | Answers | None"
Answers: TypeAlias = "Mapping[str, Answer]"

LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
# Structs, with the fields that interface.py declares; all other answers are texts or whole numbers.
_STRUCTS: Mapping[str, type] = {
    "nvmlDeviceGetMemoryInfo": interface.MemoryInfo,  # version 1 has no `reserved`
    "nvmlDeviceGetUtilizationRates": interface.Utilization,
    "nvmlDeviceGetPciInfo": interface.PciInfo,
    "nvmlDeviceGetBAR1MemoryInfo": interface.Bar1Memory,
    "nvmlDeviceGetSramEccErrorStatus": interface.SramErrors,
    "nvmlDeviceGetRowRemapperHistogram": interface.SpareRows,
    "nvmlDeviceGetGpuFabricInfoV": interface.FabricInfo,
    "nvmlGpmQueryDeviceSupport": interface.GpmSupport,
    "nvmlDeviceGetAttributes_v2": interface.Attributes,
    **dict.fromkeys(LISTS, interface.ProcessInfo),
}
FIELDS = {function: tuple(struct.__annotations__) for function, struct in _STRUCTS.items()}
FIELD_VALUES = "nvmlDeviceGetFieldValues"
GPM_METRICS = "nvmlGpmMetricsGet"
GPM_SAMPLES = ("nvmlGpmSampleGet", "nvmlGpmMigSampleGet")  # by the number of arguments for a GPU instance
MIG_HANDLE = "nvmlDeviceGetMigDeviceHandleByIndex"
# Functions that answer with a list of whole numbers.
NUMBERS = (
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetEncoderUtilization",
    "nvmlDeviceGetDecoderUtilization",
    "nvmlDeviceGetJpgUtilization",
    "nvmlDeviceGetOfaUtilization",
    "nvmlDeviceGetEncoderStats",
    "nvmlDeviceGetPowerManagementLimitConstraints",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetRepairStatus",
)
_OPTIONAL = {"reserved", "usedGpuMemory", "gpuInstanceId", "computeInstanceId"}
_TEXT_FIELDS = {"busId"}
_QUESTION = re.compile(r"(nvml\w+)(\(\d+(,\d+)*\))?")
_BEYOND = 1 << 64  # no number of NVML has more bits
_RECORD = "record it again with `gpuwarden capture`"


class CaptureError(ValueError):
    """A file cannot be replayed; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Answers of one poll: the driver's, those of each GPU by its index, and the machine's memory."""

    driver: Answers
    gpus: tuple[Answers, ...]
    host: HostMemory | None = None  # None in captures of earlier versions


@dataclass(frozen=True, slots=True)
class Capture:
    """One or more frames, `interval` seconds apart."""

    interval: float
    frames: tuple[Frame, ...]


def format_question(function: str, *arguments: int) -> str:
    """Return the key of a call."""
    return f"{function}({','.join(map(str, arguments))})" if arguments else function


def save_capture(capture: Capture, path: Path) -> None:
    """Write the file, compressed if its name ends in .gz. Raises OSError, also for a capture too large to replay."""
    text = render_capture(capture).encode()
    if len(text) > MAX_BYTES:
        raise OSError(None, f"{path}: {len(text)} bytes; maximum for a replay is {MAX_BYTES}: record fewer frames")
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def render_capture(capture: Capture) -> str:
    """Return the text of the file."""
    frames = [_written(frame) for frame in capture.frames]
    whole = {"format": FORMAT, "version": VERSION, "interval": capture.interval}
    # One frame per line, with sorted keys, so that captures can be read and compared.
    lines = ",\n".join(json.dumps(frame, separators=(",", ":"), sort_keys=True) for frame in frames)
    return f'{json.dumps(whole)[:-1]}, "frames": [\n{lines}\n]}}\n'


def _written(frame: Frame) -> dict[str, Any]:
    host = {"host": {"size": frame.host.size, "available": frame.host.available}} if frame.host else {}
    return {"driver": frame.driver, "gpus": frame.gpus, **host}


def load_capture(path: Path) -> Capture:
    """Read a capture. Raises CaptureError for a file that is unreadable, not a capture, or of another version."""
    try:
        whole = json.loads(_content(path))
    except OSError as error:
        raise CaptureError(f"{path}: cannot read the capture: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CaptureError(f"{path}: not a capture, or corrupted ({error}); {_RECORD}") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CaptureError(f"{path}: not a capture of gpuwarden; {_RECORD}")
    if whole.get("version") != VERSION:
        found = f"{whole.get('version')!r:.20}"
        raise CaptureError(f"{path}: capture version {found} is not supported, only {VERSION}; {_RECORD}")
    try:
        capture = _capture(whole)
    except (KeyError, TypeError, ValueError) as error:
        raise CaptureError(f"{path}: corrupted capture ({error}); {_RECORD}") from None
    answers = (each for frame in capture.frames for each in (frame.driver, *frame.gpus))
    if unknown := {function for each in answers for function in _unknown_functions(each)}:
        fields = format_fields(file=path, functions=",".join(sorted(unknown)))
        log.warning("capture of another version, replayed without its unknown questions %s", fields)
    return capture


def _unknown_functions(answers: Answers) -> Iterator[str]:
    """Yield the functions that this version does not call."""
    for asked, answer in answers.items():
        function = asked.partition("(")[0]
        if function not in interface.FUNCTIONS:
            yield function
        elif function == MIG_HANDLE and isinstance(answer, Mapping) and "error" not in answer:
            yield from _unknown_functions(cast("Answers", answer))


def _content(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):  # to open a FIFO would wait for its writer
        raise OSError(None, "not a regular file")
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:  # corrupted, not unreadable
        raise ValueError(str(error)) from None
    if len(content) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES} bytes")
    return bytes(content)


def _capture(whole: Mapping[str, Any]) -> Capture:
    interval, frames = whole["interval"], whole["frames"]
    if type(interval) not in (int, float) or not MIN_INTERVAL_SECONDS <= interval <= MAX_INTERVAL_SECONDS:
        raise ValueError(f"interval: expected {MIN_INTERVAL_SECONDS:g} to {MAX_INTERVAL_SECONDS:g} seconds")
    if not isinstance(frames, list) or not 1 <= len(frames) <= MAX_FRAMES:
        raise ValueError(f"frames: expected a list of 1 to {MAX_FRAMES}")
    return Capture(float(interval), tuple(_frame(frame) for frame in frames))


def _frame(frame: Any) -> Frame:
    driver, gpus = _answers(frame["driver"]), tuple(_answers(gpu) for gpu in frame["gpus"])
    count = driver.get("nvmlDeviceGetCount", 0)
    if isinstance(count, int) and not 0 <= count <= len(gpus):
        raise ValueError(f"nvmlDeviceGetCount: {count} GPUs, but the frame has {len(gpus)}")
    return Frame(driver, gpus, _host(frame.get("host")))


def _host(host: Any) -> HostMemory | None:
    if host is None:
        return None
    if not (isinstance(host, dict) and _is_whole(host.get("size")) and _is_whole(host.get("available"))):
        raise ValueError("host: expected the memory's size and available bytes")
    return HostMemory(host["size"], host["available"])


def _answers(answers: Any) -> Answers:
    if not isinstance(answers, dict):
        raise ValueError("answers: expected an object")  # noqa: TRY004 - one error class for every wrong value
    for asked, answer in answers.items():
        match = _QUESTION.fullmatch(asked)
        if match is None:
            raise ValueError(f"{asked!r:.60} is not a call of NVML")
        if match[1] in interface.FUNCTIONS and not _fits(match[1], answer):
            raise ValueError(f"{asked}: {answer!r:.60} is not a valid answer")
    return answers


def _fits(function: str, answer: Any) -> bool:
    if isinstance(answer, dict) and answer.keys() == {"error"}:
        return _is_whole(answer["error"])
    if function in LISTS or function in NUMBERS:
        fits = partial(_is_struct, function) if function in LISTS else _is_whole
        return isinstance(answer, list) and all(map(fits, answer))
    if function == MIG_HANDLE:
        return isinstance(answer, dict) and not any(map(_is_instance, answer)) and bool(_answers(answer))
    if function in (FIELD_VALUES, GPM_METRICS):
        none = answer is None and function == FIELD_VALUES
        return none or _is_whole(answer) or (type(answer) is float and isfinite(answer))
    if function in FIELDS:
        return _is_struct(function, answer)
    return type(answer) is str if function in interface.TEXTS else _is_whole(answer)


def _is_instance(asked: str) -> bool:
    return asked.startswith(MIG_HANDLE)


def _is_whole(value: Any) -> bool:
    return type(value) is int and -_BEYOND < value < _BEYOND


def _is_struct(function: str, value: Any) -> bool:
    return isinstance(value, dict) and all(
        (value.get(field) is None and field in _OPTIONAL)
        or (type(value.get(field)) is str if field in _TEXT_FIELDS else _is_whole(value.get(field)))
        for field in FIELDS[function]
    )
