"""Settings of a program's reports, checked when they are passed: later nothing may raise."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from gpuwarden.client.distributed.job_place import read_job_place

MAX_INTERVAL_SECONDS = 86400

_DEVICE = re.compile(r"[A-Z_]+:[0-9]+")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a callback or watch; `socket` None means the default."""

    name: str | None
    devices: Mapping[str, str]
    socket: str | None
    interval: float
    disabled: bool
    census: bool
    summary: bool
    logs: bool


def check_settings(
    *,
    name: str | None,
    devices: Mapping[str, str] | None,
    socket: str | os.PathLike[str] | None,
    interval: float,
    disabled: bool | None,
    census: bool | None = None,
    summary: bool | None = None,
    logs: bool = False,
) -> Settings:
    """Check the settings. Raises ValueError or TypeError with a message that begins with the argument's name."""
    if not (name is None or isinstance(name, str)):
        raise TypeError(f"name: {name!r} is not text; pass a string")
    if not (socket is None or isinstance(socket, str | os.PathLike)):
        raise TypeError(f"socket: {socket!r} is not a path; pass a string or Path")
    if isinstance(interval, bool) or not isinstance(interval, int | float):
        raise TypeError(f"interval: {interval!r} is not a number; pass seconds")
    if not 0 <= interval <= MAX_INTERVAL_SECONDS:  # a NaN is neither
        raise ValueError(f"interval: {interval!r} is out of range; pass 0 to {MAX_INTERVAL_SECONDS} seconds")
    for name_of, switch in (("disabled", disabled), ("census", census), ("summary", summary), ("logs", logs)):
        if switch not in (None, True, False):  # any text would be true, "false" and "0" included
            raise TypeError(f"{name_of}: {switch!r} is not a bool; pass True or False")
    return Settings(
        name=name,
        devices=_check_devices({} if devices is None else devices),
        socket=None if socket is None else os.fspath(socket),
        interval=interval,
        disabled=os.environ.get("GPUWARDEN_DISABLED") == "1" if disabled is None else disabled,
        census=os.environ.get("GPUWARDEN_CENSUS") == "1" if census is None else census,
        summary=_shows_summary() if summary is None else summary,
        logs=logs,
    )


def _shows_summary() -> bool:
    """Return GPUWARDEN_SUMMARY, else whether there is a user to read it: on a terminal, from one process of a job."""
    if given := os.environ.get("GPUWARDEN_SUMMARY"):
        return given == "1"
    try:
        return sys.stderr.isatty() and not read_job_place(os.environ).rank
    except (AttributeError, ValueError):  # none, or it is closed
        return False


def _check_devices(devices: Mapping[str, str]) -> dict[str, str]:
    if not (isinstance(devices, Mapping) and all(isinstance(text, str) for pair in devices.items() for text in pair)):
        raise TypeError(
            f'devices: {devices!r} is not a dict of text; pass device names and UUIDs, {{"GPU:0": "GPU-..."}}'
        )
    for device in devices:
        if not _DEVICE.fullmatch(device):  # TensorFlow accepts "/GPU:0", but it would be reported next to GPU:0
            raise ValueError(f'devices: {device!r} is not a device name; use names such as "GPU:0"')
    return dict(devices)
