"""The page Prometheus scrapes: rendered once a poll, in both text formats, and served as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, isinf, isnan
from typing import Any, TypeAlias

from gpuwarden.gpu.table import GpuReadings
from gpuwarden.host import HostReadings
from gpuwarden.metric import Histogram, Labels, Metric, Readings, Table
from gpuwarden.runs.table import RunReadings
from gpuwarden.state import State
from gpuwarden.tables import DaemonReadings, GpuHealth, GpuInPoll, ProcessReadings

TABLES: tuple[type[Table[Any]], ...] = (
    DaemonReadings,
    HostReadings,
    GpuHealth,
    GpuReadings,
    ProcessReadings,
    RunReadings,
)

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_GO_DIGITS = 6  # Go's %g leaves the plain form for a longer whole part, client_python follows

# Readings of one table: for each subject, the values of the table's key labels and what was read.
Entries: TypeAlias = "Sequence[tuple[Labels, Readings]]"


@dataclass(frozen=True, slots=True)
class Page:
    """One poll, ready to send."""

    text: bytes
    openmetrics: bytes


def entries(state: State) -> Iterator[tuple[type[Table[Any]], Entries]]:
    """Return what is exposed of a state, table by table."""
    gpus = state.snapshot.gpus
    yield DaemonReadings, [((), DaemonReadings.read(state))]
    yield HostReadings, [((), HostReadings.read(state.host))]
    yield GpuHealth, [((gpu.identity.uuid,), GpuHealth.read(GpuInPoll(gpu, state.snapshot))) for gpu in gpus]
    yield GpuReadings, [((gpu.identity.uuid,), gpu.readings) for gpu in gpus]
    yield ProcessReadings, [((), ProcessReadings.read(state))]
    yield RunReadings, [((run.peer.run_id,), RunReadings.read(run)) for run in state.runs]


class Exposition:
    """Writes pages; keeps the label text of present series from poll to poll, and no other."""

    def __init__(self) -> None:
        self._names: dict[tuple[Metric[Any], Labels], str] = {}

    def render(self, tables: Iterable[tuple[type[Table[Any]], Entries]]) -> Page:
        """Write one page. Families without samples are left out."""
        old, self._names = self._names, {}
        text: list[str] = []
        openmetrics: list[str] = []
        for table, subjects in tables:
            for row in table.rows:
                samples = "".join(self._samples(table, row, subjects, old))
                if samples:
                    text += (_text_header(row), samples)
                    openmetrics += (_openmetrics_header(row), samples)
        return Page(_bytes(text), _bytes([*openmetrics, "# EOF\n"]))

    def _samples(
        self,
        table: type[Table[Any]],
        row: Metric[Any],
        subjects: Entries,
        old: Mapping[tuple[Metric[Any], Labels], str],
    ) -> Iterator[str]:
        names = table.key + row.labels
        for key, readings in subjects:
            reading = readings.get(row)
            if reading is None:
                continue
            for labels, value in reading.items() if isinstance(reading, Mapping) else (((), reading),):
                if isinstance(value, Histogram):
                    for suffix, bucket, count in _histogram(value):
                        bucket_names = names + (("le",) if bucket else ())
                        labels_text = self._name(row, bucket_names, key + labels + bucket, old)
                        yield f"{row.name}{suffix}{labels_text} {number(count)}\n"
                else:
                    yield f"{row.name}{self._name(row, names, key + labels, old)} {number(value)}\n"

    def _name(
        self, row: Metric[Any], names: Labels, values: Labels, old: Mapping[tuple[Metric[Any], Labels], str]
    ) -> str:
        series = (row, values)
        text = old.get(series)
        if text is None:
            text = _label_text(names, values)
        self._names[series] = text
        return text


def _bytes(parts: Iterable[str]) -> bytes:
    # Anybody may give a process a name that is no UTF-8, which Python reads as surrogates: that must not cost the page.
    return "".join(parts).encode(errors="replace")


@cache
def _text_header(row: Metric[Any]) -> str:
    kind = "gauge" if row.kind == "info" else row.kind  # format 0.0.4 has no type for it
    return f"# HELP {row.name} {_escape_help(row.help)}\n# TYPE {row.name} {kind}\n"


@cache
def _openmetrics_header(row: Metric[Any]) -> str:
    name = row.name.removesuffix({"counter": "_total", "info": "_info"}.get(row.kind, ""))
    return f"# HELP {name} {_escape(row.help)}\n# TYPE {name} {row.kind}\n"


def _label_text(names: Labels, values: Labels) -> str:
    """Write labels in the order of their names, as prometheus-client does."""
    pairs = sorted(zip(names, values, strict=True))
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in pairs) + "}" if pairs else ""


def _escape_help(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n")


def _escape(value: str) -> str:
    return _escape_help(value).replace('"', '\\"')


def _histogram(histogram: Histogram) -> Iterator[tuple[str, Labels, float]]:
    """Return suffix, bucket label and value of each sample."""
    count = 0
    for bound, more in zip((*histogram.bounds, inf), histogram.counts, strict=True):
        count += more
        yield "_bucket", (number(bound),), count
    yield "_count", (), count
    yield "_sum", (), histogram.sum


def number(value: float) -> str:
    """Write a number as prometheus-client does, which follows Go: whole ones with .0, a million as 1e+06."""
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
    """Return the content type to answer an Accept header with: TEXT, unless OpenMetrics is wanted at least as much."""
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
