"""Device that the readers of a table query: each question once a reading, and never again what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from gpuwarden.host.host_reader import HostMemory
from gpuwarden.metrics.window_peaks import WindowPeaks
from gpuwarden.nvml.constants import MIG_ENABLED, NOT_AVAILABLE, NOT_AVAILABLE_LONG
from gpuwarden.nvml.gpm import Gpm
from gpuwarden.nvml.interface import Field, Handle, Nvml
from gpuwarden.nvml.return_codes import UNSUPPORTED, NVMLError, code_of, nvml_error

P = ParamSpec("P")
T = TypeVar("T")

_NOT_AVAILABLE = frozenset({NOT_AVAILABLE, NOT_AVAILABLE_LONG})


class NoValueError(Exception):
    """The driver answers that it has no value now: no sample, no error, and to be asked again."""


def require_value(answer: T) -> T:
    """Return a number that the driver gave. Raises NotToldError for the one that stands for none."""
    if type(answer) is int and answer in _NOT_AVAILABLE:
        raise NoValueError
    return answer


class Device:
    """Asks the driver each question once a reading, however many rows want to know, and never again what it lacks.

    Used by one thread at a time. Field values are fetched in one call for all fields that earlier readings of the tier
    asked for: the driver is entered once, and no list of fields has to be kept in step with the table.
    """

    def __init__(
        self, nvml: Nvml, handle: Handle, host_memory: Callable[[], HostMemory], peaks: WindowPeaks, gpm: Gpm
    ) -> None:
        self.nvml = nvml
        self.handle = handle
        self.host_memory = host_memory
        self.peaks = peaks
        self.gpm = gpm
        self.elapsed = 0.0  # seconds since the last reading; 0 in the first, and after one that failed
        self.failures: list[Exception] = []  # of this reading, that rows got over
        self.relearn_count = 0  # times that it was forgotten what the device lacks
        self._answers: dict[Any, Any] = {}
        self._lacks: set[Any] = set()  # questions that this device or driver does not support
        self._remembered: dict[Any, Any] = {}  # what holds for as long as the handle does
        self._fields: dict[Field, float | Exception | None] = {}
        self._lacking_fields: set[Field] = set()
        self._batches: dict[str, dict[Field, None]] = {}
        self._batch: dict[Field, None] = {}
        self._integrals: dict[Any, float] = {}
        self._slow = False  # whether this reading takes the slow tier too
        self._slow_answers: dict[Any, Any] = {}  # answers of the last one that did

    def attach(self, handle: Handle) -> None:
        """Go on with a new handle, after which nothing learnt of the device holds; what was added up stays."""
        self.handle = handle
        self._lacks.clear()
        self._lacking_fields.clear()
        self._remembered.clear()
        self._slow_answers.clear()

    def begin(self, elapsed: float, *, slow: bool = False) -> None:
        """Begin a reading: what was answered before is old. `slow`: it takes the slow tier too."""
        self.elapsed = elapsed
        self._slow = slow
        self.failures.clear()
        self._answers.clear()
        self._fields.clear()
        self.gpm.begin()

    def enter(self, tier: str) -> None:
        """Go on to the rows of a tier, which learns a batch of fields of its own."""
        self._batch = self._batches.setdefault(tier, {})

    def relearn(self) -> None:
        """Forget what the device lacks: a mode that was switched, MIG say, may have brought it."""
        self.relearn_count += 1
        self._lacks.clear()
        self._lacking_fields.clear()
        self.gpm.relearn()
        self._remembered = {question: answer for question, answer in self._remembered.items() if answer is not None}

    def query(self, function: Callable[Concatenate[Handle, P], T], /, *args: P.args, **_: P.kwargs) -> T:
        """Ask the driver. Blocks as long as the driver does; raises NVMLError, not remembered, or NotToldError."""
        key = (function, args)
        if key in self._answers:
            answer = self._answers[key]
        else:
            answer = self._answers[key] = function(self.handle, *args)  # type: ignore[call-arg] # NVML takes no keywords
        if type(answer) is int and answer in _NOT_AVAILABLE:  # `require_value` without the cost of a call
            raise NoValueError
        return answer  # type: ignore[no-any-return] # the key names the function that made it

    def try_query(self, function: Callable[Concatenate[Handle, P], T], /, *args: P.args, **_: P.kwargs) -> T | None:
        """Ask the driver; None where this device or driver does not support the question, or has no value now."""
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
        """Ask, once for as long as the handle lasts, what cannot change meanwhile; None where unsupported."""
        return self.remember((function, args), lambda: self.try_query(function, *args))  # type: ignore[call-arg] # as above

    def query_slowly(self, matter: Any, ask: Callable[[], T]) -> T:
        """Ask in readings of the slow tier, for what is a part of a quicker row, and return that answer in the others.

        Where asking fails, it is asked again in the next reading.
        """
        if self._slow or matter not in self._slow_answers:
            self._slow_answers.pop(matter, None)
            self._slow_answers[matter] = ask()
        return self._slow_answers[matter]  # type: ignore[no-any-return] # the matter names what answered it

    def attempt(self, ask: Callable[[], T]) -> T | None:
        """Ask for a part of a row that must not cost the rest of it; None, with the failure kept, where it fails."""
        try:
            return ask()
        except NVMLError as error:
            self.failures.append(error)
            return None

    def remember(self, matter: Any, settle: Callable[[], T]) -> T:
        """Return what was settled of a matter since the handle was attached; else settle it now, if that does not fail.

        A counter whose source, or whose unit, changed in mid-life would jump: which one serves is settled once.
        """
        if matter not in self._remembered:
            self._remembered[matter] = settle()
        return self._remembered[matter]  # type: ignore[no-any-return] # the matter names what settled it

    def is_remembered(self, matter: Any) -> bool:
        """Tell whether a matter was settled since the handle was attached."""
        return matter in self._remembered

    @property
    def divided(self) -> bool:
        """True where the GPU is divided into MIG instances now. Blocks; raises NVMLError."""
        mode = self.try_query(self.nvml.nvmlDeviceGetMigMode)
        return mode is not None and list(mode[:1]) == [MIG_ENABLED]

    def read_gpm_metric(self, metric: int) -> float | None:
        """Return a GPM metric as Gpm.read_metric does; None on a divided GPU. Blocks; raises NVMLError."""
        return self.gpm.read_metric(self.handle, metric, divided=lambda: self.divided)

    @property
    def answered(self) -> bool:
        """True if the driver has answered anything in this reading."""
        return bool(self._answers)

    def lacks(self, function: Callable[..., Any], *args: Any) -> bool:
        """Tell whether `try_query` has found this question unsupported. Other threads may ask too."""
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
                known.update(dict.fromkeys(fields, error))  # the rows to come need not ask in vain
                raise
            lacking.update(fields)  # the whole function is missing
            return
        self._answers[ask] = True
        for field, (code, value) in zip(fields, answers, strict=True):
            if code in UNSUPPORTED:
                lacking.add(field)
            else:
                known[field] = nvml_error(code) if code else value

    def integrate(self, of: Any, rate: float) -> float:
        """Add up a rate over the readings, as if it had held since the last one; a gap in them counts for nothing."""
        total = self._integrals[of] = self._integrals.get(of, 0.0) + rate * self.elapsed
        return total

    def integrated(self, of: Any) -> float:
        """Return what `integrate` has added up of a rate so far."""
        return self._integrals.get(of, 0.0)
