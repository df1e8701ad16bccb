"""Binding of the real driver through nvidia-ml-py, and a probe for the reason that it lists no GPU."""

from __future__ import annotations

import ctypes
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, cast

import pynvml

from gpuwarden.host.call_thread import CallThread
from gpuwarden.nvml.identity import decode_text
from gpuwarden.nvml.interface import FUNCTIONS, TEXTS, EventSet, Field, FieldValue, Handle, Nvml, SystemEventSet
from gpuwarden.nvml.process_lists import char_array, listing_functions
from gpuwarden.nvml.return_codes import nvml_error
from gpuwarden.nvml.troubleshooting import hidden_gpus

MIN_VERSION = "12.535.133"  # older releases lack clock event reasons; what this one lacks costs single readings only
PROBE_TIMEOUT_SECONDS = 10.0
MAX_SYSTEM_EVENTS = 256  # of one wait: NVML refuses a buffer that is too small for all
# Required functions: a module without them is too old, or of another package.
REQUIRED = (
    "nvmlInit",
    "nvmlShutdown",
    "nvmlSystemGetDriverVersion",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetCurrentClocksEventReasons",
)


def binding(module: Any = pynvml) -> Nvml:
    """Return nvidia-ml-py's functions. A function that this release lacks fails as on a driver without it.

    Raises ImportError if the module lacks required functions: it is too old, or of another package.
    """
    missing = [name for name in REQUIRED if not hasattr(module, name)]
    if missing:
        origin = getattr(module, "__file__", "of unknown origin")
        raise ImportError(
            f"the Python module pynvml ({origin}) lacks {', '.join(missing)}: "
            f"install nvidia-ml-py>={MIN_VERSION}, and remove the deprecated package named pynvml if it is there"
        )
    functions = {name: getattr(module, name, _missing) for name in FUNCTIONS}
    functions["nvmlDeviceGetGspFirmwareVersion"] = partial(_gsp_firmware_version, module)
    functions |= {name: partial(_text, functions[name]) for name in TEXTS}
    functions["nvmlDeviceGetFieldValues"] = partial(_field_values, module)
    functions["c_nvmlGpmMetricsGet_t"] = getattr(module, "c_nvmlGpmMetricsGet_t", _missing)
    for name, fills in _STRUCTS.items():
        if hasattr(module, name) and hasattr(module, fills):
            functions[name] = partial(_filled, getattr(module, name), getattr(module, fills))
        else:
            functions[name] = _missing
    functions["nvmlDeviceGetMemoryLimits_v1"] = partial(_memory_limits, module)
    functions |= listing_functions(module) | _operational_event_functions(module) | _system_event_functions(module)
    return cast("Nvml", SimpleNamespace(**functions))


# Functions that fill a struct, and its class.
_STRUCTS = {
    "nvmlDeviceGetGpuFabricInfoV": "c_nvmlGpuFabricInfo_v2_t",
    "nvmlDeviceGetSramEccErrorStatus": "c_nvmlEccSramErrorStatus_v1_t",
}


def _text(call: Callable[..., str | bytes], *arguments: object) -> str:
    """Return a text; some drivers return one that is not UTF-8 (gpuopenanalytics/pynvml#53)."""
    try:
        return decode_text(call(*arguments))
    except UnicodeDecodeError as error:
        return error.object.decode(errors="replace")


def _missing(*_arguments: object) -> Any:
    raise nvml_error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def _filled(call: Callable[..., object], new: Callable[[], Any], handle: Handle) -> Any:
    answer = new()
    call(handle, ctypes.byref(answer))
    return answer


def _operational_event_functions(module: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions of operational events, each with the struct that it fills; none in older releases."""
    if not hasattr(module, "nvmlEventSetWait_v3"):
        return {}

    def register(events: EventSet, uuid: str) -> None:
        level = module.NVML_GPU_OPERATIONAL_EVENT_LOG_LEVEL_NOTICE  # lower ones are telemetry and diagnostics
        config = module.c_nvmlGpuOperationalEventConfig_v1_t(uuid, minLogLevel=level)
        module.nvmlEventSetRegisterGpuOperationalEvents_v1(events, config)

    def wait(events: EventSet, milliseconds: int) -> Any:
        event = module.c_nvmlEventSetWait_v3_t(timeoutMs=milliseconds)
        module.nvmlEventSetWait_v3(events, event)
        # Past the structure's own access, which fails on texts that are not UTF-8.
        raw = ctypes.Structure.__getattribute__
        return SimpleNamespace(**{name: raw(event, name) for name, _kind in event._fields_})

    def context_count(events: EventSet) -> int:
        answer = module.c_nvmlEventSetGetContextCount_v1_t()
        module.nvmlEventSetGetContextCount_v1(events, answer)
        return cast("int", answer.count)

    def context_type(events: EventSet, index: int) -> int:
        answer = module.c_nvmlEventSetGetContextInfo_v1_t(index=index)
        module.nvmlEventSetGetContextInfo_v1(events, answer)
        return cast("int", answer.nvmlGpuOperationalEventContextType)

    def legacy_xid(events: EventSet, index: int) -> int:
        answer = module.c_nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1_t(index=index)
        module.nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1(events, answer)
        return cast("int", answer.xidCode)

    return {
        "nvmlEventSetRegisterGpuOperationalEvents_v1": register,
        "nvmlEventSetWait_v3": wait,
        "nvmlEventSetGetContextCount_v1": context_count,
        "nvmlEventSetGetContextInfo_v1": context_type,
        "nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1": legacy_xid,
    }


def _system_event_functions(module: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions of system events, whose requests have a version; none in older releases."""
    if not hasattr(module, "nvmlSystemEventSetWait"):
        return {}

    def wait(events: SystemEventSet, milliseconds: int) -> list[tuple[int, int]]:
        found = (module.c_nvmlSystemEventData_v1_t * MAX_SYSTEM_EVENTS)()
        version = module.nvmlSystemEventSetWaitRequest_v1
        received = module.nvmlSystemEventSetWait(version, events, milliseconds, found, MAX_SYSTEM_EVENTS)
        return [(each["eventType"], each["gpuId"]) for each in received]

    return {
        "nvmlSystemEventSetCreate": partial(module.nvmlSystemEventSetCreate, module.nvmlSystemEventSetCreateRequest_v1),
        "nvmlSystemRegisterEvents": partial(module.nvmlSystemRegisterEvents, module.nvmlSystemRegisterEventRequest_v1),
        "nvmlSystemEventSetWait": wait,
        "nvmlSystemEventSetFree": partial(module.nvmlSystemEventSetFree, module.nvmlSystemEventSetFreeRequest_v1),
    }


def _memory_limits(module: Any, handle: Handle, cgroup: str) -> Any:
    """Return the limits of a cgroup, by its folder; releases before 13.615 lack the function."""
    if not hasattr(module, "nvmlDeviceGetMemoryLimits_v1"):
        return _missing()
    limits = module.c_nvmlGetMemoryLimits_v1_t()
    limits.nameSpace = os.fsencode(cgroup)
    module.nvmlDeviceGetMemoryLimits_v1(handle, limits)
    return limits


def _gsp_firmware_version(module: Any, handle: Handle) -> bytes:
    """Call as newer releases of nvidia-ml-py do: older ones take a buffer of this size."""
    version = ctypes.create_string_buffer(64)
    code = module._nvmlGetFunctionPointer("nvmlDeviceGetGspFirmwareVersion")(handle, version)  # noqa: SLF001 - the base of its functions
    if code:
        raise nvml_error(code)
    return version.value


# nvmlFieldValue_t: field, scope, time stamp, latency, type of the value, return code, value
_FIELD = struct.Struct("=IIqqIIQ")
_DOUBLE, _RAW = struct.Struct("=d"), struct.Struct("=Q")
_SIGNED = {pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: 64, 5: 32}  # 5: signed int, which older nvidia-ml-py do not name
# -1 in the value's own width means "not available"; in a wider type it may be a counter's value.
_UNSIGNED = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: 0xFFFFFFFF,
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: 0xFFFFFFFFFFFFFFFF,
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: 0xFFFFFFFFFFFFFFFF,
    6: 0xFFFF,  # unsigned short
}


@lru_cache(maxsize=1024)  # a few batches per GPU, which repeat
def _request(fields: tuple[Field, ...]) -> bytes:
    # An entry that the driver does not fill in must not read as 0.
    untouched = 0, 0, 0, pynvml.NVML_ERROR_NOT_SUPPORTED, 0
    return b"".join(_FIELD.pack(*field, *untouched) for field in fields)


def _field_values(module: Any, handle: Handle, fields: Sequence[Field]) -> Iterable[FieldValue]:
    """Query field values as nvidia-ml-py does, but with a padded array, and without a Python object per value.

    NVML may write to the entry after the last one in queries of NVLink (XuehaiPan/nvitop pads its array for that,
    nvitop/api/libnvml.py).
    """
    request = _request(tuple(fields))
    buffer = char_array(len(request) + _FIELD.size)()
    buffer.raw = request.ljust(len(buffer), b"\0")
    code = module._nvmlGetFunctionPointer("nvmlDeviceGetFieldValues")(  # noqa: SLF001 - the base of its functions
        handle, ctypes.c_int(len(fields)), buffer
    )
    if code:
        raise nvml_error(code)
    filled = memoryview(buffer)[: len(request)]
    entries = _FIELD.iter_unpack(filled)
    return [(returned, None if returned else _value(kind, raw)) for *_, kind, returned, raw in entries]


def _value(kind: int, raw: int) -> float | None:
    """Return the number in the union; None if it is not available."""
    if kind in _UNSIGNED:
        number = raw & _UNSIGNED[kind]
        return None if number == _UNSIGNED[kind] else number
    if kind in _SIGNED:
        number = raw & (1 << _SIGNED[kind]) - 1
        return number - (1 << _SIGNED[kind]) if number >> _SIGNED[kind] - 1 else number
    if kind == pynvml.NVML_VALUE_TYPE_DOUBLE:
        double = cast("float", _DOUBLE.unpack(_RAW.pack(raw))[0])
        return double if math.isfinite(double) else None
    return None


def explain_unusable(nvml: Nvml, patience: float = PROBE_TIMEOUT_SECONDS) -> str | None:
    """Return why the driver lists no GPU; None if it lists some. Blocks for `patience` seconds if the driver hangs."""

    def probe() -> str | None:
        nvml.nvmlInit()
        try:
            count = nvml.nvmlDeviceGetCount()
        finally:
            nvml.nvmlShutdown()  # NVML counts initializations: one more would prevent every later shutdown
        return None if count else hidden_gpus(count) or "the driver lists no GPU"

    try:
        return CallThread("driver-probe").submit(probe).result(patience)
    except FutureTimeoutError:
        return f"the driver has not answered for {patience:g} s"
    except Exception as error:  # noqa: BLE001 - any failure is the reason
        return str(error) or type(error).__name__
