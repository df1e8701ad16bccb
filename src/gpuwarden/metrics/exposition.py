"""Renderer of metric tables in both Prometheus text formats, which renders only the lines that changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from math import inf, isinf, isnan
from typing import Any, TypeAlias

from gpuwarden.metrics.model import Histogram, Labels, Metric, Reading, SubjectReadings, TableReadings, Value

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_GO_DIGITS = 6  # Go's %g uses the exponent form for more digits before the point, and client_python follows it
_GO_PLAIN = 10**_GO_DIGITS  # smaller numbers have at most as many digits

_Series: TypeAlias = tuple[str, Labels, Labels]  # suffix of the name, labels of the row, bucket of a histogram
_PLAIN: tuple[_Series, ...] = (("", (), ()),)  # a single value, as most readings are


class MetricsPage:
    """Metrics of one poll, ready to send in either format."""

    def __init__(self, families: Sequence[tuple[Metric[Any], Sequence[str]]]) -> None:
        self._families = families

    @cached_property
    def text(self) -> bytes:
        """Page in format 0.0.4."""
        return _bytes(part for row, lines in self._families for part in (_text_header(row), *lines))

    @cached_property
    def openmetrics(self) -> bytes:
        """Page in OpenMetrics 1.0."""
        return _bytes(
            [part for row, lines in self._families for part in (_openmetrics_header(row), *lines)] + ["# EOF\n"]
        )


@dataclass(frozen=True, slots=True)
class _Lines:
    """Samples of one row and subject: the reading and its text."""

    reading: Reading
    text: str


_NO_LINES = _Lines(None, "")


class Exposition:
    """Renderer that caches the lines of the current series from page to page.

    Most readings do not change between polls, and comparing one takes a tenth of the time of rendering it.
    """

    def __init__(self) -> None:
        self._lines: dict[Metric[Any], dict[Labels, _Lines]] = {}

    def render(self, tables: Iterable[TableReadings]) -> MetricsPage:
        """Render one page, without families that have no samples."""
        old, self._lines = self._lines, {}
        families: list[tuple[Metric[Any], Sequence[str]]] = []
        for table, subjects in tables:
            for row in table.rows:
                lines = _row(table.key + row.labels, row, subjects, old.get(row, {}))
                if lines:
                    self._lines[row] = lines
                    families.append((row, [each.text for each in lines.values()]))
        return MetricsPage(families)


def _row(
    names: Labels, row: Metric[Any], subjects: SubjectReadings, old: Mapping[Labels, _Lines]
) -> dict[Labels, _Lines]:
    """Return the lines of each subject with a sample."""
    found: dict[Labels, _Lines] = {}
    for key, readings in subjects:
        reading = readings.get(row)
        if reading is None:
            continue
        lines = old.get(key, _NO_LINES)
        if lines.reading != reading:
            lines = _written(names, key, row, reading)
        if lines.text:
            found[key] = lines
    return found


def _written(names: Labels, key: Labels, row: Metric[Any], reading: Reading) -> _Lines:
    series, values = samples(reading)
    lines = (
        f"{_start(row, names, key, each)} {format_number(value)}\n" for each, value in zip(series, values, strict=True)
    )
    return _Lines(reading, "".join(lines))


def _start(row: Metric[Any], names: Labels, key: Labels, series: _Series) -> str:
    suffix, labels, bucket = series
    bucket_name = ("le",) if bucket else ()
    return f"{row.name}{suffix}{_label_text(names + bucket_name, key + labels + bucket)}"


def samples(reading: Reading) -> tuple[tuple[_Series, ...], Sequence[float]]:
    """Return the series of a reading and their values; none for None."""
    if not isinstance(reading, Mapping):
        return _samples_of((), reading)
    series: list[_Series] = []
    values: list[float] = []
    for labels, value in reading.items():
        more, theirs = _samples_of(labels, value)
        series += more
        values += theirs
    return tuple(series), values


def _samples_of(labels: Labels, value: Value | None) -> tuple[tuple[_Series, ...], Sequence[float]]:
    if value is None:
        return (), ()
    if isinstance(value, Histogram):
        cumulative = list(accumulate(value.counts))
        return _histogram_series(labels, value.bounds), [*cumulative, cumulative[-1], value.sum]
    return (("", labels, ()),) if labels else _PLAIN, (value,)


def _bytes(parts: Iterable[str]) -> bytes:
    # A process name may not be UTF-8, and Python reads it as surrogates: the page must not fail on it.
    return "".join(parts).encode(errors="replace")


@cache
def _text_header(row: Metric[Any]) -> str:
    kind = "gauge" if row.kind == "info" else row.kind  # format 0.0.4 has no type info
    return f"# HELP {row.name} {_escape_help(row.help)}\n# TYPE {row.name} {kind}\n"


@cache
def _openmetrics_header(row: Metric[Any]) -> str:
    name, kind = family_of(row)
    return f"# HELP {name} {_escape(row.help)}\n# TYPE {name} {kind}\n"


def family_of(row: Metric[Any]) -> tuple[str, str]:
    """Return the name and type of a row's metric family, as in OpenMetrics and prometheus-client."""
    ending = {"counter": "_total", "info": "_info"}.get(row.kind, "")
    kind = (
        row.kind if row.name.endswith(ending) else "unknown"
    )  # counters under the names of other exporters do not end in _total
    return row.name.removesuffix(ending), kind


def _label_text(names: Labels, values: Labels) -> str:
    """Format labels in the order of their names, as prometheus-client does."""
    pairs = sorted(zip(names, values, strict=True))
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in pairs) + "}" if pairs else ""


def _escape_help(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n")


def _escape(value: str) -> str:
    return _escape_help(value).replace('"', '\\"')


@lru_cache(maxsize=1024)
def _histogram_series(labels: Labels, bounds: tuple[float, ...]) -> tuple[_Series, ...]:
    buckets = tuple(("_bucket", labels, (format_number(bound),)) for bound in (*bounds, inf))
    return (*buckets, ("_count", labels, ()), ("_sum", labels, ()))


def format_number(value: float) -> str:
    """Format a number as prometheus-client does, which follows Go: integers with .0, a million as 1e+06."""
    if -inf < value < _GO_PLAIN:  # most numbers
        return repr(float(value))
    if isnan(value):
        return "NaN"
    if isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    written = repr(float(value))
    digits, point, rest = written.partition(".")
    if value > 0 and point and len(digits) > _GO_DIGITS:
        mantissa = f"{digits[0]}.{digits[1:]}{rest}".rstrip("0.")
        return f"{mantissa}e+{len(digits) - 1:02d}"
    return written


def negotiate(accept: str) -> str:
    """Return the content type for an Accept header: OpenMetrics if preferred at least as much as TEXT, else TEXT."""
    wanted = {TEXT: 0.0, OPENMETRICS: 0.0}
    for offer in accept.split(","):
        media, *parameters = (part.strip().lower() for part in offer.split(";"))
        quality = next((_quality(p[2:]) for p in parameters if p.startswith("q=")), 1.0)
        if media == "application/openmetrics-text":
            wanted[OPENMETRICS] = max(wanted[OPENMETRICS], quality)
        elif media in ("text/plain", "text/*", "*/*"):
            wanted[TEXT] = max(wanted[TEXT], quality)
    return OPENMETRICS if wanted[OPENMETRICS] and wanted[OPENMETRICS] >= wanted[TEXT] else TEXT


def _quality(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
