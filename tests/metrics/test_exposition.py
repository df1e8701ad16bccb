"""The page equals what prometheus-client writes, in both formats."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.utils import floatToGoString

from gpuwarden.collector import families
from gpuwarden.metrics.exposition import OPENMETRICS, TEXT, Exposition, format_number, negotiate
from gpuwarden.metrics.model import Histogram, Metric, SubjectReadings, Table


class Sample(Table[object], prefix="gpuwarden_sample_", key=("uuid",)):
    """One row of each kind."""

    used_bytes = Metric[object]("gpuwarden_sample_used_bytes", "gauge", "bytes", "Has a \\.", lambda _: None)
    clock_hertz = Metric[object](
        "gpuwarden_sample_clock_hertz", "gauge", "hertz", "By label.", lambda _: None, labels=("clock", "a")
    )
    energy_joules_total = Metric[object](
        "gpuwarden_sample_energy_joules_total", "counter", "joules", "A counter.", lambda _: None
    )
    info = Metric[object]("gpuwarden_sample_info", "info", "", "An info.", lambda _: None, labels=("name", "zone"))
    step_seconds = Metric[object](
        "gpuwarden_sample_step_seconds", "histogram", "seconds", "A histogram.", lambda _: None
    )


class Peer:
    """prometheus-client's side of the comparison."""

    def __init__(self, entries: SubjectReadings) -> None:
        self._entries = entries

    def collect(self) -> Iterator[Family]:
        """Yield the families as a custom collector does."""
        return families([(Sample, self._entries)])


def compare(entries: SubjectReadings, page: Exposition | None = None) -> None:
    """Assert byte equality in both formats."""
    registry = CollectorRegistry()
    registry.register(Peer(entries))
    ours = (page or Exposition()).render([(Sample, entries)])
    assert ours.text == exposition.generate_latest(registry)
    assert ours.openmetrics == openmetrics.generate_latest(registry, version="1.0.0", escaping="allow-utf-8")


text = st.text(max_size=12)
floats = st.floats(allow_nan=True, allow_infinity=True)
entry = st.fixed_dictionaries(
    {
        Sample.used_bytes: floats,
        Sample.clock_hertz: st.dictionaries(st.tuples(text, text), floats, max_size=3),
        Sample.energy_joules_total: st.floats(min_value=0, allow_infinity=False),
        Sample.info: st.dictionaries(st.tuples(text, text), st.just(1.0), max_size=2),
        Sample.step_seconds: st.builds(
            Histogram,
            st.just((0.005, 1.0, 2.5)),
            st.tuples(*[st.integers(0, 10**9)] * 4),
            st.floats(min_value=0, allow_infinity=False),
        ),
    }
)


@given(st.dictionaries(st.tuples(text), entry, max_size=3))
def test_page_equals_prometheus_client(subjects: dict[tuple[str], Any]) -> None:
    """For any labels and values, both formats equal those of prometheus-client byte for byte."""
    compare(list(subjects.items()))


def test_escaping() -> None:
    """Quotes, backslashes and newlines in labels come out as prometheus-client writes them."""
    hostile = 'a"b\\c\nd{}=,é'
    compare([((hostile,), {Sample.used_bytes: 1, Sample.info: {(hostile, hostile): 1}})])


def test_name_that_is_no_utf_8_costs_no_page() -> None:
    """A process name of any bytes, read by Python as surrogates, gives a valid UTF-8 page."""
    reading: dict[Metric[Any], Any] = {Sample.info: {("bad\udcff", "name"): 1}}
    page = Exposition().render([(Sample, [(("one",), reading)])])
    assert b'"bad?"' in page.text
    assert b'"bad?"' in page.openmetrics


def test_kept_names_do_not_leak_between_pages() -> None:
    """A page rendered after another one has only its own series, and the cache is limited to them."""
    page = Exposition()
    compare([(("one",), {Sample.used_bytes: 1}), (("two",), {Sample.used_bytes: 2})], page)
    compare([(("two",), {Sample.used_bytes: 3})], page)
    assert page._lines.keys() == {Sample.used_bytes}
    assert page._lines[Sample.used_bytes].keys() == {("two",)}


few = st.sampled_from(("one", "a b", 'c"\\\n} 1 '))  # so that pages have series in common
# An equal reading is not rendered again: nor a negative zero, nor the same labels in another order.
changing = st.fixed_dictionaries(
    {},
    optional={
        Sample.used_bytes: st.floats().map(lambda value: value + 0.0),
        Sample.clock_hertz: st.dictionaries(st.tuples(few, few), st.integers(0, 3), max_size=3).map(
            lambda reading: dict(sorted(reading.items()))
        ),
        Sample.step_seconds: st.builds(
            Histogram, st.just((0.5,)), st.tuples(st.integers(0, 3), st.integers(0, 3)), st.integers(0, 3)
        ),
    },
)


@given(st.lists(st.dictionaries(st.tuples(few), changing, max_size=2), min_size=2, max_size=5))
def test_pages_after_each_other_equal_prometheus_client(pages: list[dict[tuple[str], Any]]) -> None:
    """Series that come, go or change between pages never appear on a page of another poll."""
    page = Exposition()
    for subjects in pages:
        compare(list(subjects.items()), page)


def test_labels_change_and_their_number_does_not() -> None:
    """A page does not give one series the name of another."""
    page = Exposition()
    for first in ("sm", "memory", "video"):
        compare([(("one",), {Sample.clock_hertz: {(first, "x"): 1.0, ("b", "y"): 2.0}})], page)


def test_histograms_by_label() -> None:
    """Each combination of a row's labels has its own buckets, whose bounds may change."""

    class Timed(Table[object], prefix="gpuwarden_timed_", key=("uuid",)):
        seconds = Metric[object]("gpuwarden_timed_seconds", "histogram", "seconds", "By op.", lambda _: None, ("op",))

    page = Exposition()
    for bounds in ((0.5,), (0.5,), (2.0,)):
        reading: dict[tuple[str, ...], Histogram | float] = {}
        reading |= {("read",): Histogram(bounds, (1, 2), 3.5), ("write",): Histogram(bounds, (0, 1), 9.0)}
        text = page.render([(Timed, [(("one",), {Timed.seconds: reading})])]).text.decode()
        assert text.splitlines()[2:] == [
            f'gpuwarden_timed_seconds{part},uuid="one"}} {value}'
            for op, counts, total in (("read", (1, 3), 3.5), ("write", (0, 1), 9.0))
            for part, value in (
                (f'_bucket{{le="{bounds[0]}",op="{op}"', float(counts[0])),
                (f'_bucket{{le="+Inf",op="{op}"', float(counts[1])),
                (f'_count{{op="{op}"', float(counts[1])),
                (f'_sum{{op="{op}"', total),
            )
        ]


def test_histogram_with_too_few_counts_is_no_page() -> None:
    """A wrong number of counts raises, rather than giving wrong buckets."""
    with pytest.raises(ValueError, match="shorter"):
        Exposition().render([(Sample, [(("one",), {Sample.step_seconds: Histogram((1.0, 2.0), (3,), 9.5)})])])


@given(st.floats() | st.integers(-(2**63), 2**63))
def test_number_is_written_as_prometheus_client_does(value: float) -> None:
    """Floats, and counts and bytes, which are integers here, read the same as in prometheus-client."""
    assert format_number(value) == floatToGoString(value)


def test_openmetrics_page_parses() -> None:
    """The strict parser of the format accepts a page with every kind of row."""
    readings: Mapping[Metric[Any], Any] = {
        Sample.used_bytes: 1.5e9,
        Sample.clock_hertz: {("sm", "x"): 1e9},
        Sample.energy_joules_total: 12.5,
        Sample.info: {("H100", "a"): 1},
        Sample.step_seconds: Histogram((0.1, 1.0), (1, 2, 3), 4.5),
    }
    page = Exposition().render([(Sample, [(("GPU-1",), readings)])])
    parsed = {family.name: family for family in parse_openmetrics(page.openmetrics.decode())}
    assert parsed["gpuwarden_sample_step_seconds"].samples[-2].value == 6
    assert parsed["gpuwarden_sample_energy_joules"].type == "counter"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html,*/*;q=0.8", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2", OPENMETRICS),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.9", TEXT),
        ("text/plain,application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=nonsense", TEXT),
    ],
)
def test_format_is_negotiated(accept: str, expected: str) -> None:
    """Prometheus gets OpenMetrics, and clients that do not accept it the text format."""
    assert negotiate(accept) == expected
