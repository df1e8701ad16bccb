"""Common forms of readings, and readers of single calls or fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpuwarden.metrics.model import Labels, state_set
from gpuwarden.nvml.device import Device


def present(names: Iterable[str], values: Iterable[float | None], scale: float = 1.0) -> dict[Labels, float]:
    """Return values by label, multiplied by `scale`; a missing value has no sample."""
    return {(name,): value * scale for name, value in zip(names, values, strict=True) if value is not None}


def one_of(states: Mapping[str, int], number: float | None) -> dict[Labels, float]:
    """Return the state set for NVML's number of a state: a newer state is named by its number; empty for None."""
    if number is None:
        return {}
    current = next((name for name, state in states.items() if state == number), f"state_{number:.0f}")
    return state_set(dict.fromkeys([*states, current]), current)


# Each returns a reader, which raises NVMLError. `function` is one of `Nvml`, such as Nvml.nvmlDeviceGetNumGpuCores.


def answer(function: Callable[..., Any]) -> Callable[[Device], float | None]:
    """Read one number; None if this device or driver does not support it."""
    return lambda gpu: gpu.try_query(getattr(gpu.nvml, function.__name__))


def state(states: Mapping[str, int], function: Callable[..., Any]) -> Callable[[Device], dict[Labels, float]]:
    """Read the number of a state, as `one_of` samples."""
    return lambda gpu: one_of(states, gpu.try_query(getattr(gpu.nvml, function.__name__)))


def settings(function: Callable[..., Any], names: tuple[str, str]) -> Callable[[Device], dict[Labels, float]]:
    """Read two numbers that one call returns."""
    return lambda gpu: present(names, gpu.try_query(getattr(gpu.nvml, function.__name__)) or (None, None))


def field(number: int) -> Callable[[Device], float | None]:
    """Read one field."""
    return lambda gpu: gpu.field(number)


def labeled_fields(numbers: Mapping[str, int]) -> Callable[[Device], dict[Labels, float]]:
    """Read a field for each label value."""
    return lambda gpu: present(numbers, gpu.fields((number, 0) for number in numbers.values()))
