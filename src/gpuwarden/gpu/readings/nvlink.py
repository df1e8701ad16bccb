"""NVLink, and the link between chips of a superchip."""

from __future__ import annotations

from gpuwarden.gpu import fields
from gpuwarden.gpu.device import Device
from gpuwarden.metric import Labels

_KIBI = 1024
_MEGA = 1e6
_UP = frozenset({1, 2})  # active, and asleep to save power: NVML_NVLINK_STATE_*


def _links(gpu: Device, number: int = fields.NVLINK_COUNT) -> range:
    return range(int(gpu.field(number) or 0))


def states(gpu: Device) -> dict[Labels, float]:
    """Whether each link is up."""
    links = _links(gpu)
    found = gpu.fields((fields.NVLINK_STATE, link) for link in links)
    return {(str(link),): float(state in _UP) for link, state in zip(links, found, strict=True) if state is not None}


def speed(gpu: Device) -> float | None:
    """Bytes a second that the links which are up can move in each direction, together."""
    found = [speed for speed in gpu.fields((fields.NVLINK_SPEED, link) for link in _links(gpu)) if speed is not None]
    return sum(found) * _MEGA if found else None


def transferred(gpu: Device) -> dict[Labels, float]:
    """Bytes of data over all links since the driver loaded, by direction."""
    if not _links(gpu):
        return {}
    per_link = gpu.settled("NVLink bytes per link", lambda: _all_links(gpu) is None)
    return (_summed(gpu) if per_link else _all_links(gpu)) or {}


def _all_links(gpu: Device) -> dict[Labels, float] | None:
    numbers = fields.NVLINK_KIBIBYTES
    found = gpu.fields((number, fields.ALL_LINKS) for number in numbers.values())
    kibibytes = {(name,): value for name, value in zip(numbers, found, strict=True) if value is not None}
    return {direction: value * _KIBI for direction, value in kibibytes.items()} or None


def _summed(gpu: Device) -> dict[Labels, float]:
    return {(direction,): sum(found) for direction, found in _of_links(gpu, fields.NVLINK_BYTES) if found}


def _of_links(gpu: Device, numbers: dict[str, int]) -> list[tuple[str, list[float]]]:
    links = _links(gpu)
    found = iter(gpu.fields((number, link) for number in numbers.values() for link in links))
    by_name = [(name, [next(found) for _link in links]) for name in numbers]
    return [(name, [value for value in values if value is not None]) for name, values in by_name]


def errors(gpu: Device) -> dict[Labels, float]:
    """Errors over all links since the driver loaded, by type."""
    return {(name,): sum(found) for name, found in _of_links(gpu, fields.NVLINK_ERRORS) if found}


def link_errors(gpu: Device) -> dict[Labels, float]:
    """Errors of the links that have any: which one to look at, without a series for each of hundreds that are 0."""
    links, numbers = _links(gpu), fields.NVLINK_ERRORS
    asked = [(name, link) for name in numbers for link in links]
    found = gpu.fields((numbers[name], link) for name, link in asked)
    return {(str(link), name): count for (name, link), count in zip(asked, found, strict=True) if count}


def chip_links(gpu: Device) -> dict[Labels, float]:
    """Whether each link to the CPU of a superchip is up."""
    links = _links(gpu, fields.C2C_COUNT)
    found = gpu.fields((fields.C2C_STATUS, link) for link in links)
    return {(str(link),): float(state == 1) for link, state in zip(links, found, strict=True) if state is not None}
