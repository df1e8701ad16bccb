"""Chart and report of a run's memory: correct, and within the width and letters of the terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from run_record_cases import example_record

from gpuwarden.cli.runs.memory_chart import ASCII, BLOCKS, HEIGHT, LABEL_WIDTH, choose_alphabet, render_chart
from gpuwarden.cli.runs.memory_report import TerminalFormat, render_memory_timeline
from gpuwarden.records.record import RecordedDevice, RunRecord, set_headline
from gpuwarden.records.record_parts import MemoryTimeline, RecordedDiagnosis
from gpuwarden.runs.run_events import RunEvent
from snapshots import GIB

MIB = 1 << 20


def timeline(
    lows: list[int],
    highs: list[int] | None = None,
    peaks: list[int] | None = None,
    left: list[float | None] | None = None,
) -> MemoryTimeline:
    """Return a timeline with points of ten seconds, in GiB."""
    points = len(lows)
    return MemoryTimeline(
        began_seconds=tuple(10.0 * each for each in range(points)),
        ended_seconds=tuple(10.0 * each + 10 for each in range(points)),
        lowest_bytes=tuple(each * GIB for each in lows),
        highest_bytes=tuple(each * GIB for each in highs or lows),
        peak_bytes=tuple(each * GIB for each in peaks or highs or lows),
        phase=("train",) * points,
        headroom_bytes=tuple(None if each is None else each * GIB for each in left or ()),
    )


def draw(memory: MemoryTimeline, width: int = 20) -> list[str]:
    """Return a chart in ASCII, without the labels."""
    return [line[LABEL_WIDTH + 1 :] for line in render_chart(memory, memory.ended_seconds[-1], width, ASCII)]


def make_record(devices: int = 1, events: int = 0, **changes: object) -> RunRecord:
    """Return a run record with a timeline for each device."""
    share = RecordedDevice(uuid="GPU-0", name="H100", timeline=timeline([2] * 20, peaks=[3] * 20, left=[5.0] * 20))
    shares = tuple(
        replace(share, uuid=f"GPU-{each}", lowest_headroom_bytes=float(GIB * (9 - each))) for each in range(devices)
    )
    made = tuple(RunEvent(float(each), "phase" if each else "out_of_memory", f"mark {each}") for each in range(events))
    bare = replace(
        example_record(),
        devices=shares,
        events=made,
        reported_errors=(),
        census=None,
        host_memory_growth_bytes_per_second=None,
    )
    return replace(bare, **changes)  # type: ignore[arg-type] # its fields


def lines(made: RunRecord, width: int = 80) -> list[str]:
    """Return the lines of the report."""
    return [
        f"{label or ''} {text}" if label is not None else text
        for label, text in render_memory_timeline(made, TerminalFormat(width, ASCII))
    ]


def test_bars_and_peak_stand_at_their_heights() -> None:
    """Eight lines for 8 GiB show 4 GiB in use and a peak of 8 GiB."""
    picture = draw(timeline([2, 2], [4, 4], [8, 8]))
    assert picture == [letter.strip() * 20 for letter in "-   ####"] + ["-" * 20, f"{'20s':>20}"]


def test_a_leak_climbs() -> None:
    """A leak is a staircase: each higher line starts further to the right."""
    picture = draw(timeline(list(range(1, 9))), width=8)
    assert [line.count("#") for line in picture[:HEIGHT]] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_time_without_a_daemon_is_blank() -> None:
    """Columns of a time without a daemon stay blank."""
    gap = replace(timeline([4, 4]), began_seconds=(0.0, 60.0), ended_seconds=(20.0, 80.0))
    assert draw(gap)[4] == "#####          #####"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 300])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_charts_fit_the_terminal(width: int, devices: int) -> None:
    """No line of a chart is wider than the terminal, nor than 140 columns."""
    made = make_record(devices, events=30)
    page = TerminalFormat(width, BLOCKS)
    drawn_lines = [text for label, text in render_memory_timeline(made, page) if label is None]
    charts = devices if devices <= 2 else 1
    assert len(drawn_lines) == charts * (HEIGHT + 2)
    assert max(map(len, drawn_lines)) <= max(min(width, 140), 26)


def test_tightest_device_has_the_chart() -> None:
    """Only the GPU with the least headroom has a chart, if there are many."""
    said = lines(make_record(8))
    assert [line for line in said if line.startswith("memory on")] == [
        f"memory on GPU-{each}" for each in range(7, -1, -1)
    ]


@pytest.mark.parametrize("kind", ["out_of_memory", "oom"])
def test_most_important_events_are_listed(kind: str) -> None:
    """The most important events are listed in order of time, the others counted; an older name ranks the same."""
    made = make_record(events=30)
    first = replace(made.events[0], kind=kind)  # type: ignore[arg-type] # records have older names
    said = lines(replace(made, events=(first, *made.events[1:])))
    assert [line.partition(" ")[2] for line in said if " mark " in line] == [
        "mark 0",
        *(f"mark {n}" for n in range(22, 30)),
    ]
    assert " and 21 minor events (--json has all)" in said


@pytest.mark.parametrize(
    ("lows", "sentence"),
    [
        ([2] * 30, "was steady: 2.00 GiB in use between steps"),
        ([0, *[2] * 29], "was steady"),
        (list(range(1, 31)), "rose 11.0 GiB in the last third of the run; not a clear trend"),
        (list(range(31, 1, -1)), "fell "),
        ([2] * 4, "too short to say"),
    ],
)
def test_course_in_a_sentence(lows: list[int], sentence: str) -> None:
    """A timeline that is long enough says whether memory is steady."""
    made = make_record()
    made = replace(made, devices=(replace(made.devices[0], timeline=timeline(lows)),))
    (course,) = [line for line in lines(made) if line.startswith("memory ") and not line.startswith("memory on")]
    assert sentence in course


def test_record_without_a_timeline() -> None:
    """A record of an earlier version has no report on memory."""
    bare = replace(example_record(), devices=(), reported_errors=(), census=None, batch_size_advice=None, headline=None)
    assert lines(replace(bare, host_memory_growth_bytes_per_second=None)) == []


def test_headline_comes_last() -> None:
    """The report ends with the headline and its next step, so that a terminal still shows them."""
    made = set_headline(replace(make_record(), reported_errors=example_record().reported_errors))
    assert lines(made)[-3:] == [
        "cause Out of GPU memory: the model does not fit",
        "evidence 4.00 GiB did not fit next to 9.00 GiB of 11.0 GiB.",
        "next step Use a smaller model.",
    ]
    assert not [line for line in lines(made) if "steady" in line]


def test_one_sentence_on_the_batch() -> None:
    """A diagnosis replaces the batch size advice: the next step has it, if the batch is the cause."""
    error = replace(example_record().reported_errors[0], diagnosis=RecordedDiagnosis("leak", "It grew.", "Find it."))
    advised = replace(make_record(), reported_errors=(), batch_size_advice=example_record().batch_size_advice)
    assert [line for line in lines(advised) if line.startswith("batch size ")]
    diagnosed = lines(replace(advised, reported_errors=(error,)))
    assert not [line for line in diagnosed if line.startswith("batch size ")]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"seconds_to_oom": 900.0, "seconds_to_oom_lower": 800.0, "seconds_to_oom_upper": 1000.0},
            "forecast leak of 60.0 MiB a minute: out of memory in about 15m00s (13m20s to 16m40s)",
        ),
        (
            {"seconds_to_oom": 900.0, "seconds_to_oom_lower": 800.0},
            "forecast leak of 60.0 MiB a minute: out of memory in about 15m00s (13m20s to longer)",
        ),
        ({}, "forecast leak of 60.0 MiB a minute; time to out of memory unknown"),
        (
            {"memory_growth_bytes_per_second": 1000.0},
            "forecast leak of 3.43 MiB an hour; time to out of memory unknown",
        ),
    ],
)
def test_forecast_in_a_sentence(changes: dict[str, float], sentence: str) -> None:
    """A leak is shown with its rate and the time until memory is full."""
    made = make_record()
    growing = replace(made.devices[0], **{"memory_growth_bytes_per_second": float(MIB), **changes})  # type: ignore[arg-type] # its fields
    made = replace(made, devices=(growing,), host_memory_growth_bytes_per_second=2.0 * MIB, seconds_to_host_oom=60.0)
    said = lines(replace(made, outcome=None))
    assert sentence in said
    assert "forecast leak in host memory of 120 MiB a minute: host out of memory in about 1m00s" in said


@pytest.mark.parametrize(
    ("encoding", "environment", "letters"),
    [
        ("utf-8", {"LANG": "en_US.UTF-8"}, BLOCKS),
        ("utf-8", {}, BLOCKS),
        ("utf-8", {"LC_ALL": "C", "LANG": "en_US.UTF-8"}, ASCII),
        ("utf-8", {"LANG": "POSIX"}, ASCII),
        ("utf-8", {"LC_CTYPE": "C.UTF-8"}, BLOCKS),
        ("ascii", {"LANG": "en_US.UTF-8"}, ASCII),
        ("iso-8859-1", {"LANG": "de_DE"}, ASCII),
        (None, {}, ASCII),
        ("no-such", {}, ASCII),
    ],
)
def test_alphabet_follows_the_locale(encoding: str | None, environment: dict[str, str], letters: object) -> None:
    """Charts have block characters where both the output and the locale can show them."""
    assert choose_alphabet(encoding, environment) is letters
