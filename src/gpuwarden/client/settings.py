"""Settings of a program's reports, checked where they are given: later nothing may raise."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

MAX_INTERVAL_SECONDS = 86400

_DEVICE = re.compile(r"[A-Z_]+:[0-9]+")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of whatever reports; `socket` None is the default one."""

    name: str | None
    devices: Mapping[str, str]
    socket: str | None
    interval: float
    disabled: bool


def check_settings(
    *,
    name: str | None,
    devices: Mapping[str, str] | None,
    socket: str | os.PathLike[str] | None,
    interval: float,
    disabled: bool | None,
) -> Settings:
    """Check the settings. Raises ValueError or TypeError that begins with the name of the wrong one."""
    if not (name is None or isinstance(name, str)):
        raise TypeError(f"name: want text, not {name!r}")
    if not (socket is None or isinstance(socket, str | os.PathLike)):
        raise TypeError(f"socket: want a path, not {socket!r}")
    if isinstance(interval, bool) or not isinstance(interval, int | float):
        raise TypeError(f"interval: want seconds, not {interval!r}")
    if not 0 <= interval <= MAX_INTERVAL_SECONDS:  # a NaN is neither
        raise ValueError(f"interval: want seconds, from 0 to {MAX_INTERVAL_SECONDS}, not {interval!r}")
    if disabled not in (None, True, False):  # text is true whatever it says, "false" and "0" too
        raise TypeError(f"disabled: want True or False, not {disabled!r}")
    return Settings(
        name=name,
        devices=_check_devices({} if devices is None else devices),
        socket=None if socket is None else os.fspath(socket),
        interval=interval,
        disabled=os.environ.get("GPUWARDEN_DISABLED") == "1" if disabled is None else disabled,
    )


def _check_devices(devices: Mapping[str, str]) -> dict[str, str]:
    if not (isinstance(devices, Mapping) and all(isinstance(text, str) for pair in devices.items() for text in pair)):
        raise TypeError(
            f'devices: want the GPU of each of the framework\'s devices, {{"GPU:0": "GPU-..."}}, not {devices!r}'
        )
    for device in devices:
        if not _DEVICE.fullmatch(device):  # TensorFlow would know "/GPU:0", but as a second device next to GPU:0
            raise ValueError(f'devices: want names such as "GPU:0", not {device!r}')
    return dict(devices)
