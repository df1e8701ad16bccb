"""Model of a metric: one table row that owns its name, kind, unit, help, labels and reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

Kind = Literal["gauge", "counter", "histogram", "info"]
Unit = Literal["", "bytes", "bytes_per_second", "celsius", "hertz", "joules", "ratio", "seconds", "watts"]
# How often a reading is taken. poll: in every one; memory: likewise, of looks more frequent than polls; slow: every
# poll.slow_interval; static: once after the driver was initialised.
Tier = Literal["memory", "poll", "slow", "static"]
Labels: TypeAlias = tuple[str, ...]

_ENDING: dict[Kind, str] = {"gauge": "", "counter": "_total", "histogram": "", "info": "_info"}


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by bucket: `counts` has an entry a bound and one for +Inf, not cumulative."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


Value: TypeAlias = "float | Histogram"
# One value, or one for each combination of the row's labels; None: the subject has no such reading, so no sample.
Reading: TypeAlias = "Value | Mapping[Labels, Value] | None"
Subject = TypeVar("Subject")
Readings: TypeAlias = "Mapping[Metric[Any], Reading]"


def state_set(states: Iterable[str], current: str) -> dict[Labels, float]:
    """Return 1 for the current state and 0 for the others, as a StateSet of OpenMetrics does."""
    return {(state,): float(state == current) for state in states}


@dataclass(frozen=True, eq=False)  # no slots: they break Metric[Subject](…) on Python 3.11
class Metric(Generic[Subject]):
    """One row: what Prometheus calls a reading, and how to take it in base units.

    A row is its own key: readings are looked up by row, so a misspelt one fails at type check and import.
    `source` names the driver call or kernel file the value comes from, `opt_in` the option without which it is not
    read; docs/reference/metrics.md shows both, and the tier.
    """

    name: str
    kind: Kind
    unit: Unit
    help: str
    read: Callable[[Subject], Reading]
    labels: tuple[str, ...] = ()
    source: str = ""
    tier: Tier = "poll"
    opt_in: str = ""

    def __post_init__(self) -> None:
        ending = (f"_{self.unit}" if self.unit else "") + _ENDING[self.kind]
        if not (self.name.startswith("gpuwarden_") and self.name.endswith(ending)):
            raise ValueError(f"{self.name}: a {self.kind} in {self.unit or 'no unit'} is named gpuwarden_…{ending}")
        if self.kind != "counter" and self.name.endswith("_total"):
            raise ValueError(f"{self.name}: only counters end in _total")
        if not self.help.endswith("."):
            raise ValueError(f"{self.name}: the help is a sentence and ends with a full stop")


class Table(Generic[Subject]):
    """Rows declared as class attributes, each named by its metric without the table's prefix.

    `key` names the labels that say which subject a sample is about; they come before a row's own labels.
    """

    prefix: ClassVar[str]
    key: ClassVar[tuple[str, ...]]
    rows: ClassVar[tuple[Metric[Any], ...]]

    def __init_subclass__(cls, *, prefix: str, key: tuple[str, ...] = ()) -> None:
        cls.prefix, cls.key = prefix, key
        named = {name: row for name, row in vars(cls).items() if isinstance(row, Metric)}
        for name, row in named.items():
            if row.name != prefix + name:
                raise ValueError(f"{cls.__name__}.{name} is called {row.name}; want {prefix}{name}")
        cls.rows = tuple(named.values())

    @classmethod
    def read(cls, subject: Subject) -> Readings:
        """Take every row's reading of `subject`; for subjects whose readers cannot fail."""
        return {row: row.read(subject) for row in cls.rows}


# For each subject of a table, the values of the table's key labels, and the subject's readings.
SubjectReadings: TypeAlias = "Sequence[tuple[Labels, Readings]]"
TableReadings: TypeAlias = "tuple[type[Table[Any]], SubjectReadings]"
