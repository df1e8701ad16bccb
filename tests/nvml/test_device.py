"""Calls of a device, and how often they are made."""

import time
from collections.abc import Sequence
from typing import cast

import pynvml
import pytest

from gpuwarden.host.host_reader import HostMemory
from gpuwarden.metrics.window_peaks import WindowPeaks
from gpuwarden.nvml.device import Device
from gpuwarden.nvml.gpm import Gpm
from gpuwarden.nvml.interface import Field, FieldValue, Handle, Nvml
from gpuwarden.nvml.return_codes import NVMLError, nvml_error


class Fields:
    """A driver that supports some field values, by number and scope; an error's code stands for the error."""

    def __init__(self, **errors: int) -> None:
        self.batches: list[Sequence[Field]] = []
        self.whole = errors.get("whole", 0)
        self.codes: dict[Field, int] = {}

    def nvmlDeviceGetFieldValues(self, _handle: Handle, fields: Sequence[Field]) -> list[FieldValue]:  # noqa: N802
        """Return number times ten plus scope."""
        self.batches.append(fields)
        if self.whole:
            raise nvml_error(self.whole)
        return [(self.codes.get(field, 0), 10 * field[0] + field[1]) for field in fields]


def device(nvml: Fields) -> Device:
    """Return the device."""
    seam = cast("Nvml", nvml)
    return Device(seam, cast("Handle", 1), lambda: HostMemory(0, 0), WindowPeaks(), Gpm(seam, time.monotonic))


def test_fields_are_fetched_in_one_call() -> None:
    """The fields that earlier readings of a tier requested come in one call, at the first of them."""
    nvml = Fields()
    gpu = device(nvml)
    for _ in range(3):
        gpu.begin(1.0)
        gpu.enter("slow", {})
        assert [gpu.field(82), gpu.field(138, 3), gpu.field(82)] == [820.0, 1383, 820.0]
        gpu.enter("poll", {})
        assert gpu.field(186) == 1860.0
    assert nvml.batches == [((82, 0),), ((138, 3),), ((186, 0),)] + 2 * [((82, 0), (138, 3)), ((186, 0),)]


def test_unsupported_field_is_requested_once() -> None:
    """An unsupported call is not repeated until `relearn`."""
    nvml = Fields()
    nvml.codes[(82, 0)] = pynvml.NVML_ERROR_NOT_SUPPORTED
    gpu = device(nvml)
    for _ in range(2):
        gpu.begin(1.0)
        gpu.enter("slow", {})
        assert [gpu.field(82), gpu.field(83)] == [None, 830.0]
    assert nvml.batches == [((82, 0),), ((83, 0),), ((83, 0),)]
    del nvml.codes[(82, 0)]
    gpu.relearn()
    gpu.begin(1.0)
    assert gpu.field(82) == 820.0


def test_failing_field_affects_itself_only() -> None:
    """Another error of one field affects that field only, and the field is requested again."""
    nvml = Fields()
    gpu = device(nvml)
    nvml.codes[(83, 0)] = pynvml.NVML_ERROR_UNKNOWN
    for _ in range(2):
        gpu.begin(1.0)
        assert gpu.field(82) == 820.0
        with pytest.raises(NVMLError):
            gpu.field(83)
    nvml.codes.clear()
    gpu.begin(1.0)
    assert gpu.field(83) == 830.0


def test_driver_without_field_values() -> None:
    """A library without the function has no fields; a lost GPU is an error."""
    nvml = Fields(whole=pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    gpu = device(nvml)
    for _ in range(2):
        gpu.begin(1.0)
        assert gpu.field(82) is None
    assert len(nvml.batches) == 1
    with pytest.raises(NVMLError):
        device(Fields(whole=pynvml.NVML_ERROR_GPU_IS_LOST)).field(82)


def test_integral_counts_no_gap() -> None:
    """A rate adds up over the time between readings; the first, or one after a failure, adds nothing."""
    gpu = device(Fields())
    totals = []
    for elapsed in (0.0, 1.0, 2.0, 0.0, 1.0):
        gpu.begin(elapsed)
        totals.append(gpu.integrate("busy", 0.5))
    assert totals == [0.0, 0.5, 1.5, 1.5, 2.0]
