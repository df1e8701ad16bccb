"""NVLink, and the link between the chips of a superchip (C2C)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from gpuwarden.gpu.readings.shapes import present
from gpuwarden.metrics.model import Labels
from gpuwarden.nvml import fields
from gpuwarden.nvml.device import Device

_KIBI = 1024
_MEGA = 1e6
_MAX_LINKS = 64  # read at most, whatever count the driver returns; NVML supports 36
_ERROR_TYPES = "NVLink error types"
_BYTES_SOURCE = "source of NVLink bytes"
_SWITCHED_OFF = 2  # relearns since a link last counted, after which it counts as switched off
_UP = frozenset({1, 2})  # active, and asleep to save power: NVML_NVLINK_STATE_*


def _links(gpu: Device, number: int = fields.NVLINK_COUNT) -> range:
    return range(min(int(gpu.field(number) or 0), _MAX_LINKS))


def states(gpu: Device) -> dict[Labels, float]:
    """Read which links are up."""
    links = _links(gpu)
    found = gpu.fields((fields.NVLINK_STATE, link) for link in links)
    return {(str(link),): float(state in _UP) for link, state in zip(links, found, strict=True) if state is not None}


def speed(gpu: Device) -> float | None:
    """Total bytes per second of the links that are up, in each direction."""
    found = [speed for speed in gpu.fields((fields.NVLINK_SPEED, link) for link in _links(gpu)) if speed is not None]
    return sum(found) * _MEGA if found else None


def transferred(gpu: Device) -> dict[Labels, float]:
    """Bytes of data over all links since the driver loaded, by direction.

    Some drivers answer 0 for the sum over the links while the links count. So the source is the first one that has
    counted anything, and does not change later. Until then there is no value if the raw counters show traffic.
    """
    links = _links(gpu)
    if not links:
        return {}
    if gpu.is_remembered(_BYTES_SOURCE):
        return gpu.remember(_BYTES_SOURCE, lambda: _all_links)(gpu)
    sources = (_all_links, _kibibytes_by_link, _bytes_by_link)
    counting = next((source for source in sources if any(source(gpu).values())), None)
    if counting:
        return gpu.remember(_BYTES_SOURCE, lambda: counting)(gpu)
    zero = next(filter(None, (source(gpu) for source in sources)), {})
    raw = gpu.fields((number, link) for number in fields.NVLINK_RAW_KIBIBYTES for link in (fields.ALL_LINKS, *links))
    return {} if any(raw) else zero


def _all_links(gpu: Device) -> dict[Labels, float]:
    numbers = fields.NVLINK_KIBIBYTES
    return present(numbers, gpu.fields((number, fields.ALL_LINKS) for number in numbers.values()), _KIBI)


def _kibibytes_by_link(gpu: Device) -> dict[Labels, float]:
    numbers = fields.NVLINK_KIBIBYTES
    return {direction: n * _KIBI for direction, n in _totals(gpu, numbers, _read_links(gpu, numbers)).items()}


def _bytes_by_link(gpu: Device) -> dict[Labels, float]:
    return _totals(gpu, fields.NVLINK_BYTES, _read_links(gpu, fields.NVLINK_BYTES))


def _totals(
    gpu: Device, numbers: Mapping[str, int], known: Sequence[tuple[str, Sequence[float | None]]]
) -> dict[Labels, float]:
    totals = ((name, _total(gpu, numbers[name], found)) for name, found in known)
    return {(name,): total for name, total in totals if total is not None}


def _total(gpu: Device, number: int, found: Sequence[float | None]) -> float | None:
    """Sum a counter over the links; None if no link has it, and for a minute or two if a link stops reporting it.

    Without that link the sum would decrease, which Prometheus treats as a counter reset: rate() would count all earlier
    errors again. So there is no sum until the link is queried again. A link that stays silent is switched off, and its
    last count stays in the total. A new handle, and so a GPU reset, drops all of that.
    """
    counted: dict[int, tuple[float, int]] = gpu.remember(("counted by link", number), dict)
    known = {link: (value, gpu.relearn_count) for link, value in enumerate(found) if value is not None}
    counted |= known
    if any(gpu.relearn_count < counted[link][1] + _SWITCHED_OFF for link in counted.keys() - known.keys()):
        return None
    return sum(value for value, _when in counted.values()) if counted else None


def _read_links(gpu: Device, numbers: Mapping[str, int]) -> list[tuple[str, list[float | None]]]:
    links = _links(gpu)
    found = gpu.fields([(number, link) for number in numbers.values() for link in links])
    return [
        (name, found[first : first + len(links)]) for name, first in zip(numbers, count(0, len(links)), strict=False)
    ]


def _counted_errors(gpu: Device) -> list[tuple[str, list[float | None]]]:
    """Return the errors of each link, for the types that this generation of links counts."""
    if gpu.is_remembered(_ERROR_TYPES):
        return _read_links(gpu, gpu.remember(_ERROR_TYPES, dict))
    counted = [(name, found) for name, found in _read_links(gpu, fields.NVLINK_ERRORS) if found != [None] * len(found)]
    if counted:
        gpu.remember(_ERROR_TYPES, lambda: {name: fields.NVLINK_ERRORS[name] for name, _found in counted})
    return counted


def errors(gpu: Device) -> dict[Labels, float]:
    """Errors over all links since the driver loaded, by type."""
    if not _links(gpu):
        return {}
    totals = fields.NVLINK_ERROR_TOTALS
    known = present(totals, gpu.fields((number, 0) for number in totals.values()))
    return _totals(gpu, fields.NVLINK_ERRORS, _counted_errors(gpu)) | known


def link_errors(gpu: Device) -> dict[Labels, float]:
    """Errors of links that have any, so that there are no series for hundreds of zeros."""
    counted = _counted_errors(gpu)
    return {(str(link), name): value for name, found in counted for link, value in enumerate(found) if value}


def _read_chip_links(gpu: Device, number: int) -> list[float | None]:
    return gpu.fields((number, link) for link in _links(gpu, fields.C2C_COUNT))


def chip_links(gpu: Device) -> dict[Labels, float]:
    """Read which links to the CPU of a superchip are up."""
    found = enumerate(_read_chip_links(gpu, fields.C2C_STATUS))
    return {(str(link),): float(state == 1) for link, state in found if state is not None}


def chip_speed(gpu: Device) -> float | None:
    """Total bytes per second of the links to the CPU of a superchip."""
    found = [speed for speed in _read_chip_links(gpu, fields.C2C_SPEED) if speed is not None]
    return sum(found) * _MEGA if found else None


def chip_errors(gpu: Device) -> dict[Labels, float]:
    """Errors over all links to the CPU of a superchip, by type."""
    found = [(name, _read_chip_links(gpu, number)) for name, number in fields.C2C_ERRORS.items()]
    return _totals(gpu, fields.C2C_ERRORS, found)
