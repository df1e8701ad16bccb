"""Device for the readers of the metric table: caches answers within a reading, and skips unsupported calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from gpuwarden.host.host_reader import HostMemory
from gpuwarden.metrics.model import Metric, Readings
from gpuwarden.metrics.window_peaks import WindowPeaks
from gpuwarden.nvml.constants import MIG_ENABLED, NOT_AVAILABLE, NOT_AVAILABLE_LONG
from gpuwarden.nvml.gpm import Gpm
from gpuwarden.nvml.interface import Field, Handle, Nvml
from gpuwarden.nvml.return_codes import UNSUPPORTED, NVMLError, code_of, nvml_error

P = ParamSpec("P")
T = TypeVar("T")

_NOT_AVAILABLE = frozenset({NOT_AVAILABLE, NOT_AVAILABLE_LONG})


class NoValueError(Exception):
    """The driver has no value now: no sample, no error, and to be queried again."""


def require_value(answer: T) -> T:
    """Return a number from the driver. Raises NoValueError for the number that means "not available"."""
    if type(answer) is int and answer in _NOT_AVAILABLE:
        raise NoValueError
    return answer


class Device:
    """Device whose calls are made once per reading, however many rows need them; unsupported calls are not repeated.

    Used by one thread at a time. Field values are fetched in one call for all fields that earlier readings of the tier
    needed, so no list of fields has to match the table.
    """

    def __init__(
        self, nvml: Nvml, handle: Handle, host_memory: Callable[[], HostMemory], peaks: WindowPeaks, gpm: Gpm
    ) -> None:
        self.nvml = nvml
        self.handle = handle
        self.host_memory = host_memory
        self.peaks = peaks
        self.gpm = gpm
        self.elapsed = 0.0  # seconds since the last reading; 0 in the first one, and after a failed one
        self.failures: list[Exception] = []  # of this reading, that did not cost a row
        self.relearn_count = 0  # number of `relearn` calls
        self._readings: Readings = {}
        self._answers: dict[Any, Any] = {}
        self._lacks: set[Any] = set()  # calls that this device or driver does not support
        self._constants: dict[Any, Any] = {}  # answers of `query_once`
        self._remembered: dict[Any, Any] = {}  # valid as long as the handle
        self._fields: dict[Field, float | Exception | None] = {}
        self._lacking_fields: set[Field] = set()
        self._batches: dict[str, dict[Field, None]] = {}
        self._batch: dict[Field, None] = {}
        self._integrals: dict[Any, float] = {}
        self._slow = False  # whether this reading includes the slow tier
        self._slow_answers: dict[Any, Any] = {}  # answers of the last reading that did

    def attach(self, handle: Handle) -> None:
        """Use a new handle: drop what was learned of the device, keep integrals."""
        self.handle = handle
        self._lacks.clear()
        self._lacking_fields.clear()
        self._constants.clear()
        self._remembered.clear()
        self._slow_answers.clear()

    def begin(self, elapsed: float, *, slow: bool = False) -> None:
        """Start a reading: drop the answers of the last one. `slow`: it includes the slow tier."""
        self.elapsed = elapsed
        self._slow = slow
        self.failures.clear()
        self._answers.clear()
        self._fields.clear()
        self.gpm.begin()

    def enter(self, tier: str, readings: Readings) -> None:
        """Continue with the rows of a tier, which has its own batch of fields; `readings` fills as they are read."""
        self._readings = readings
        self._batch = self._batches.setdefault(tier, {})

    def relearn(self) -> None:
        """Try unsupported calls again: a changed mode, such as MIG, may support them."""
        self.relearn_count += 1
        self._lacks.clear()
        self._lacking_fields.clear()
        self.gpm.relearn()
        self._remembered = {question: answer for question, answer in self._remembered.items() if answer is not None}

    def forget_constants(self) -> None:
        """Query again what cannot change: an answer may have been nonsense."""
        self._constants.clear()

    def query(self, function: Callable[Concatenate[Handle, P], T], /, *args: P.args, **_: P.kwargs) -> T:
        """Query the driver. Blocks as long as the driver does; raises NVMLError (not cached) or NoValueError."""
        key = (function, args)
        if key in self._answers:
            answer = self._answers[key]
        else:
            answer = self._answers[key] = function(self.handle, *args)  # type: ignore[call-arg] # NVML takes no keywords
        if type(answer) is int and answer in _NOT_AVAILABLE:  # `require_value` without the cost of a call
            raise NoValueError
        return answer  # type: ignore[no-any-return] # the key names the function that made it

    def try_query(self, function: Callable[Concatenate[Handle, P], T], /, *args: P.args, **_: P.kwargs) -> T | None:
        """Query the driver; None if this device or driver does not support the call, or has no value now."""
        key = (function, args)
        if key in self._lacks:
            return None
        if key in self._answers:
            answer = self._answers[key]
        else:
            try:
                answer = self._answers[key] = function(self.handle, *args)  # type: ignore[call-arg] # as above
            except NVMLError as error:
                if code_of(error) not in UNSUPPORTED:
                    raise
                self._lacks.add(key)
                return None
        return None if type(answer) is int and answer in _NOT_AVAILABLE else answer

    def query_once(self, function: Callable[Concatenate[Handle, P], T], /, *args: P.args, **_: P.kwargs) -> T | None:
        """Query once per handle what cannot change, unless `forget_constants` follows; None if unsupported."""
        key = (function, args)
        if key not in self._constants:
            self._constants[key] = self.try_query(function, *args)  # type: ignore[call-arg] # as above
        return self._constants[key]  # type: ignore[no-any-return] # the key names the function that made it

    def query_slowly(self, key: Any, query: Callable[[], T]) -> T:
        """Query in readings of the slow tier, for a part of a row of the poll tier; return that answer in the others.

        If the query fails, it is repeated in the next reading.
        """
        if self._slow or key not in self._slow_answers:
            self._slow_answers.pop(key, None)
            self._slow_answers[key] = query()
        return self._slow_answers[key]  # type: ignore[no-any-return] # the key names the type of its value

    def attempt(self, query: Callable[[], T]) -> T | None:
        """Query a part of a row that must not cost the rest of it; None, with the failure kept, if that fails."""
        try:
            return query()
        except NVMLError as error:
            self.failures.append(error)
            return None

    def remember(self, key: Any, compute: Callable[[], T]) -> T:
        """Return the value remembered under `key` for this handle; compute it with `compute` the first time.

        Used to choose a source once: a counter whose source or unit changes would jump.
        """
        if key not in self._remembered:
            self._remembered[key] = compute()
        return self._remembered[key]  # type: ignore[no-any-return] # the key names the type of its value

    def is_remembered(self, key: Any) -> bool:
        """Return whether a value is remembered for this handle."""
        return key in self._remembered

    @property
    def divided(self) -> bool:
        """True if the GPU is divided into MIG instances. Blocks; raises NVMLError."""
        mode = self.try_query(self.nvml.nvmlDeviceGetMigMode)
        return mode is not None and list(mode[:1]) == [MIG_ENABLED]

    def read_gpm_metric(self, metric: int) -> float | None:
        """Return a GPM metric as Gpm.read_metric does; None on a divided GPU. Blocks; raises NVMLError."""
        return self.gpm.read_metric(self.handle, metric, divided=lambda: self.divided)

    @property
    def answered(self) -> bool:
        """True if any call of this reading was answered."""
        return bool(self._answers)

    def lacks(self, function: Callable[..., Any], *args: Any) -> bool:
        """Return whether `try_query` found this call unsupported. May be called from any thread."""
        return (function, args) in self._lacks

    def field(self, number: int, scope: int = 0) -> float | None:
        """Return a field value, in NVML's unit; None where unsupported. Raises NVMLError."""
        return self.fields([(number, scope)])[0]

    def fields(self, wanted: Iterable[Field]) -> list[float | None]:
        """Return field values, in NVML's units, with at most one call; None where unsupported. Raises NVMLError."""
        wanted, known, lacking = list(wanted), self._fields, self._lacking_fields
        new = [field for field in wanted if field not in known and field not in lacking]
        if new:
            self._fetch(new)
        values = [known.get(field) for field in wanted]
        for value in values:
            if isinstance(value, Exception):
                raise value
        return cast("list[float | None]", values)

    def _fetch(self, wanted: list[Field]) -> None:
        known, lacking = self._fields, self._lacking_fields
        self._batch.update(dict.fromkeys(wanted))
        fields = [field for field in self._batch if field not in known and field not in lacking]
        ask = self.nvml.nvmlDeviceGetFieldValues
        try:
            answers = ask(self.handle, tuple(fields))
        except NVMLError as error:
            if code_of(error) not in UNSUPPORTED:
                known.update(dict.fromkeys(fields, error))  # later rows need not try again
                raise
            lacking.update(fields)  # the whole function is missing
            return
        self._answers[ask] = True
        for field, (code, value) in zip(fields, answers, strict=True):
            if code in UNSUPPORTED:
                lacking.add(field)
            else:
                known[field] = nvml_error(code) if code else value

    def require_reading(self, row: Metric[Any]) -> float:
        """Return the reading of an earlier row of the tier. Raises NoValueError if it has none, or it was refused."""
        reading = self._readings.get(row)
        if not isinstance(reading, (int, float)):
            raise NoValueError
        return reading

    def integrate(self, of: Any, rate: float) -> float:
        """Integrate a rate over the readings, each value since the last reading; a gap counts as zero."""
        total = self._integrals[of] = self._integrals.get(of, 0.0) + rate * self.elapsed
        return total

    def integrated(self, of: Any) -> float:
        """Return the integral of a rate so far."""
        return self._integrals.get(of, 0.0)
