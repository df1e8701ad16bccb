"""One GPU as the readers of the table see it: what it answers now, and what earlier readings taught of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from gpuwarden.gpu.gpm import Gpm
from gpuwarden.gpu.host_memory import HostMemory
from gpuwarden.gpu.nvml import UNSUPPORTED, Field, Handle, Nvml, NVMLError, code_of, field_value, nvml_error
from gpuwarden.gpu.peaks import Peaks

P = ParamSpec("P")
T = TypeVar("T")


class Device:
    """Asks the driver each question once a reading, however many rows want to know, and never again what it lacks.

    Used by one thread at a time. Field values are fetched in one call for all fields that earlier readings of the tier
    asked for: the driver is entered once, and no list of fields has to be kept in step with the table.
    """

    def __init__(
        self, nvml: Nvml, handle: Handle, host_memory: Callable[[], HostMemory], peaks: Peaks, gpm: Gpm
    ) -> None:
        self.nvml = nvml
        self.handle = handle
        self.host_memory = host_memory
        self.peaks = peaks
        self.gpm = gpm
        self.elapsed = 0.0  # seconds since the last reading; 0 in the first, and after one that failed
        self._answers: dict[Any, Any] = {}
        self._lacks: set[Any] = set()  # questions that this device or driver does not support
        self._fields: dict[Field, float | Exception] = {}
        self._batches: dict[str, dict[Field, None]] = {}
        self._batch: dict[Field, None] = {}
        self._integrals: dict[Any, float] = {}

    def begin(self, elapsed: float) -> None:
        """Begin a reading: what was answered before is old."""
        self.elapsed = elapsed
        self._answers.clear()
        self._fields.clear()
        self.gpm.begin()

    def enter(self, tier: str) -> None:
        """Go on to the rows of a tier, which learns a batch of fields of its own."""
        self._batch = self._batches.setdefault(tier, {})

    def relearn(self) -> None:
        """Forget what the device lacks: a mode that was switched, MIG say, may have brought it."""
        self._lacks.clear()
        self.gpm.relearn()

    def query(self, function: Callable[Concatenate[Handle, P], T], /, *args: P.args, **_: P.kwargs) -> T:
        """Ask the driver. Blocks as long as the driver does; raises NVMLError; failures are not remembered."""
        key = (function, args)
        if key in self._answers:
            return self._answers[key]  # type: ignore[no-any-return] # the key names the function that made it
        answer = self._answers[key] = function(self.handle, *args)  # type: ignore[call-arg] # NVML takes no keywords
        return answer

    def supported(self, function: Callable[Concatenate[Handle, P], T], /, *args: P.args, **_: P.kwargs) -> T | None:
        """Ask the driver; None where this device or driver does not support the question."""
        key = (function, args)
        if key in self._lacks:
            return None
        try:
            return self.query(function, *args)  # type: ignore[call-arg] # as above
        except NVMLError as error:
            if code_of(error) not in UNSUPPORTED:
                raise
            self._lacks.add(key)
            return None

    @property
    def answered(self) -> bool:
        """Whether the driver has answered anything in this reading."""
        return bool(self._answers)

    def lacks(self, function: Callable[..., Any], *args: Any) -> bool:
        """Tell whether `supported` has found this question unsupported. Other threads may ask too."""
        return (function, args) in self._lacks

    def field(self, number: int, scope: int = 0) -> float | None:
        """Return a field value, in NVML's unit; None where unsupported. Raises NVMLError."""
        wanted = number, scope
        if wanted in self._lacks:
            return None
        if wanted not in self._fields:
            self._fetch(wanted)
        value = self._fields[wanted]
        if isinstance(value, Exception):
            raise value
        return value if wanted not in self._lacks else None

    def _fetch(self, wanted: Field) -> None:
        self._batch[wanted] = None
        fields = [field for field in self._batch if field not in self._fields and field not in self._lacks]
        values = self.supported(self.nvml.nvmlDeviceGetFieldValues, tuple(fields))
        if values is None:  # the whole function is missing
            self._lacks.update(fields)
            self._fields.update(dict.fromkeys(fields, 0.0))
            return
        for field, value in zip(fields, values, strict=True):
            code = value.nvmlReturn
            if code in UNSUPPORTED:
                self._lacks.add(field)
                del self._batch[field]
            self._fields[field] = nvml_error(code) if code and code not in UNSUPPORTED else field_value(value)

    def integral(self, of: Any, rate: float) -> float:
        """Add up a rate over the readings, as if it had held since the last one; a gap in them counts for nothing."""
        total = self._integrals[of] = self._integrals.get(of, 0.0) + rate * self.elapsed
        return total
