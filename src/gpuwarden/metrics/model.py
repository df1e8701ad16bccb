"""Model of a metric: a table row with name, type, unit, help, labels and reader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

Kind = Literal["gauge", "counter", "histogram", "info"]
Unit = Literal["", "bytes", "bytes_per_second", "celsius", "hertz", "joules", "ratio", "seconds", "watts"]
# How often a reading is taken. poll: every poll; memory: every poll, from samples between polls; slow: every
# poll.slow_interval; static: once after the driver is initialized.
Tier = Literal["memory", "poll", "slow", "static"]
# Smallest profile of the metrics page that has the metric.
Profile = Literal["minimal", "standard", "full"]
Labels: TypeAlias = tuple[str, ...]

_ENDING: dict[Kind, str] = {"gauge": "", "counter": "_total", "histogram": "", "info": "_info"}


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by bucket: `counts` has one entry per bound and one for +Inf, not cumulative."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


Value: TypeAlias = "float | Histogram"
# One value, or one per combination of the row's labels; None: no reading, so no sample.
Reading: TypeAlias = "Value | Mapping[Labels, Value] | None"
Subject = TypeVar("Subject")
Readings: TypeAlias = "Mapping[Metric[Any], Reading]"


def state_set(states: Iterable[str], current: str) -> dict[Labels, float]:
    """Return 1 for the current state and 0 for the others, as a StateSet of OpenMetrics does."""
    return {(state,): float(state == current) for state in states}


@dataclass(frozen=True, eq=False)  # no slots: they break Metric[Subject](…) on Python 3.11
class Metric(Generic[Subject]):
    """Row of a table: a metric's name in Prometheus, and the reader of its value in base units.

    Readings are looked up by row, so that a misspelled one fails in the type checker and at import. `source` is the
    driver call or kernel file of the value, `opt_in` the option without which it is not read;
    docs/reference/metrics.md has both, the tier and the profile. The profile minimal has of its rows the samples whose
    labels begin with one of `minimal_labels`.

    `bounds` are the least and the greatest value that a GPU can have; the greatest may be the reading of a row above.
    Others are refused by the ReadingGate. A row without bounds gets those of its kind and unit (DEFAULT_BOUNDS there).
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
    profile: Profile = "standard"
    minimal_labels: tuple[Labels, ...] = ((),)
    bounds: tuple[float, float | Metric[Any]] | None = None

    def __post_init__(self) -> None:
        ending = (f"_{self.unit}" if self.unit else "") + _ENDING[self.kind]
        # process_: names that Prometheus' client libraries share, which are of the daemon's own process.
        if not (self.name.startswith(("gpuwarden_", "process_")) and self.name.endswith(ending)):
            raise ValueError(f"{self.name}: a {self.kind} in {self.unit or 'no unit'} is named gpuwarden_…{ending}")
        if self.kind != "counter" and self.name.endswith("_total"):
            raise ValueError(f"{self.name}: only counters end in _total")
        if not self.help.endswith("."):
            raise ValueError(f"{self.name}: help must be a sentence that ends with a full stop")


class Table(Generic[Subject]):
    """Table of rows declared as class attributes, each named by its metric without the table's prefix.

    `key` has the labels that identify the subject of a sample; they come before a row's own labels. The docstring is
    the table's heading in docs/reference/metrics.md.
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
        """Return every row's reading of `subject`; for readers that cannot fail."""
        return {row: row.read(subject) for row in cls.rows}


# For each subject of a table: the values of the key labels, and the readings.
SubjectReadings: TypeAlias = "Sequence[tuple[Labels, Readings]]"
TableReadings: TypeAlias = "tuple[type[Table[Any]], SubjectReadings]"
