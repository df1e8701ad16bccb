"""The benchmarks run: their figures are for people, that there is one in every row is for us."""

import importlib.util
import subprocess
import sys
from dataclasses import replace

import pytest
from services import ROOT

import growth
import soak
import write_down
from system_parts import needs

driver = pytest.mark.usefixtures("mock_nvml_library")  # skips where there is no compiler


def tables(program: str, *arguments: str) -> list[list[list[str]]]:
    """Run a benchmark quickly; return the cells of the rows of each of its tables, heads left out."""
    command = [sys.executable, str(ROOT / "bench" / program), "--quick", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    blocks = [part for part in done.stdout.split("\n\n") if part.startswith("| ")]
    return [[[cell.strip() for cell in line.split("|")[1:-1]] for line in each.splitlines()[2:]] for each in blocks]


@driver
def test_advice_gives_every_figure() -> None:
    """A smoke run of bench/advice.py has the advice come, from both drivers."""
    (rows,) = tables("advice.py")
    assert [cells[1] for cells in rows] == ["1 GPU, instant answers", "8 GPUs, answers as slow as on hardware"]
    assert all(float(cells[2]) > 0 for cells in rows), rows


@driver
def test_alert_latency_measures_both_ways() -> None:
    """A smoke run of bench/alert_latency.py has alerts come straight from the daemon and by way of Prometheus."""
    needs("prometheus", "prometheus")
    needs("prometheus-alertmanager", "prometheus-alertmanager")
    (rows,) = tables("alert_latency.py")
    assert [cells[0] for cells in rows] == ["fast path", "Prometheus, scrapes 1 s, rules 1 s"]
    assert all(float(cells[1]) > 0 for cells in rows), rows


@driver
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_batch_size_advises() -> None:
    """A smoke run of bench/batch_size.py has a real fit advised: by one size, with low confidence, twice as much."""
    ((cells,),) = tables("batch_size.py")
    assert cells[:3] == ["recurrent", "128", "256 (low)"]


@driver
def test_exporters_gives_every_figure() -> None:
    """A smoke run of bench/exporters.py without the peer measures every row of its table."""
    (rows,) = tables("exporters.py", "--without-peer")
    measured = {cells[0]: float(cells[1]) for cells in rows}
    assert measured["series"] > measured["memory, resident, MiB"] > 1, measured  # a full page, and MiB it is
    assert list(measured) == [
        "CPU of a process that only wakes ten times a second, s/min",
        "CPU of the polls without looks at memory, no scrapes, s/min",
        "CPU of the polls without looks at memory, a scrape every 15 s, s/min",
        "CPU of the polls without looks at memory, a scrape every second, s/min",
        "CPU of the polls, no scrapes, s/min",
        "CPU of the polls, a scrape every 15 s, s/min",
        "CPU of the polls, a scrape every second, s/min",
        "scrape p50, first of a page, as Prometheus asks, ms",
        "scrape p50, new connection, ms",
        "scrape p50, kept connection, ms",
        "scrape p50, kept connection, gzip, ms",
        "scrape p99, first of a page, as Prometheus asks, ms",
        "scrape p99, new connection, ms",
        "scrape p99, kept connection, ms",
        "scrape p99, kept connection, gzip, ms",
        "CPU of a scrape, first of a page, ms",
        "CPU of a scrape, of many in a row, ms",
        "memory, resident, MiB",
        "memory, proportional, MiB",
        "memory, anonymous, MiB",
        "start to first full page, s",
        "series",
        "page, KB",
    ]
    barred = {cells[0]: (float(cells[1]), float(cells[2]), cells[3]) for cells in rows if cells[2]}
    assert len(barred) == 10
    for name, (figure, most, met) in barred.items():
        if figure != most:  # as rounded
            assert met == ("yes" if figure < most else "**no**"), name


@driver
def test_status_page_measures_viewers() -> None:
    """A smoke run of bench/status_page.py has viewers who cost something, and scrapes beside them."""
    spent, took = tables("status_page.py")
    assert [cells[0] for cells in spent] == ["0", "1", "20"]
    assert [cells[0] for cells in took] == ["0", "20"]
    assert all(float(cells[1]) > 0 for cells in (*spent, *took)), (spent, took)


@driver
def test_scale_measures_every_size() -> None:
    """A smoke run of bench/scale.py without the peer has a row for each size, whose pages grow with the GPUs."""
    sizes, delayed = tables("scale.py", "--without-peer")
    assert [cells[0] for cells in sizes] == ["1", "8", "64", "256", "16 x 7 MIG"]
    pages = [float(cells[4]) for cells in sizes[:4]]
    assert pages == sorted(pages)
    assert pages[3] > 100 * pages[0] / 8  # GPUs make the page, not what stands on each
    assert len(delayed) == 2
    for _name, mean, worst, *_bar in delayed:
        assert 5 < float(mean) <= float(worst)  # the delays are felt: 8 GPUs' process lists alone take 36 ms


@driver
def test_soak_keeps_the_daemon_working() -> None:
    """A smoke run of bench/soak.py serves every page while all goes wrong, and says what the daemon holds."""
    (rows,) = tables("soak.py")
    assert len(rows) == soak.ROWS
    assert all(float(held) > 1 for cells in rows for held in cells[2:])
    hours = [float(cells[1]) for cells in rows]
    assert hours[-1] > hours[0]  # it polled until the end


def test_run_end_measures_every_way() -> None:
    """A smoke run of bench/run_end.py has a row for each way to end, and tells a time that has passed."""
    (rows,) = tables("run_end.py")
    assert [cells[0] for cells in rows] == ["SIGKILL", "exit", "SIGKILL, and a worker holds the connection"]
    for _name, usual, longest, most, met in rows:
        assert 0 < float(usual) <= float(longest)
        assert met == ("yes" if float(longest) <= float(most) else "**no**")


@driver
def test_many_runs_measures_them() -> None:
    """A smoke run of bench/many_runs.py has a row without runs and two with them, and all cost something."""
    (rows,) = tables("many_runs.py")
    assert [cells[0] for cells in rows] == ["0", "20", "20"]
    assert all(float(cells[3].rstrip("%")) > 0 for cells in rows)
    assert 20 < float(rows[1][1]) < 120  # reports a second, of 80
    for cells in rows[1:]:
        assert cells[5] == ("yes" if float(cells[3].rstrip("%")) <= float(cells[4].rstrip("%")) else "**no**")


def test_growth_measures_each_row() -> None:
    """A smoke run of bench/growth.py has a row for a report and one for each shape and age, and all cost something."""
    (rows,) = tables("growth.py")
    assert len(rows) == 1 + 2 * len(growth.SHAPES)
    for _, cost, most, met in rows:
        spent, bar = float(cost.split()[0].rstrip("%")), float(most.split()[0].rstrip("%"))
        assert spent > 0
        assert met == ("yes" if spent <= bar else "**no**") or spent == bar  # as rounded


STILL = soak.Held(resident=20.0, anonymous=10.0, files=12, threads=4)


def test_soak_finds_what_grows() -> None:
    """A slow leak of any kind is named; ups and downs are none."""
    up_and_down = [replace(STILL, files=12 + index % 5, threads=4 + index % 2) for index in range(20)]
    assert list(soak.beyond(soak.growth(up_and_down), soak.TOLERANCES, "there")) == []
    leaks = {"resident": 0.2, "anonymous": 0.2, "files": 1, "threads": 1}
    for name, each in leaks.items():
        leaking = [replace(STILL, **{name: getattr(STILL, name) + each * index}) for index in range(20)]
        (told,) = soak.beyond(soak.growth(leaking), soak.TOLERANCES, "there")
        assert told.startswith(f"{name} grew by ")


def test_figures_have_their_places_in_the_docs() -> None:
    """What a benchmark prints replaces what it printed before, and nothing else of the page."""
    in_performance = ("exporters.py", "scale.py", "soak.py", "callback.py", "watch.py", "run_end.py", "many_runs.py")
    for program in (*in_performance, "alert_noise.py", "incidents.py"):
        page = write_down.page_of(program).read_text(encoding="utf-8")
        once = write_down.written(page, program, "| new | figures |\n")
        assert "\n| new | figures |\n" in once
        assert write_down.place(program).sub("", once) == write_down.place(program).sub("", page)
    with pytest.raises(LookupError):
        write_down.page_of("no_benchmark.py")


@driver
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_headroom_is_held_against_the_truth() -> None:
    """A smoke run of bench/headroom.py has one real out-of-memory, told to the MiB where the pool's size is known."""
    ((cells,),) = tables("headroom.py")
    assert cells[:3] == ["growth, pool told", "leak", "4.0"]
    told, least, left, error = map(float, cells[4:])
    assert 0 <= left < 4 + 2  # the allocator's regions are whole MiB
    assert least <= told
    assert error == pytest.approx(told - left, abs=0.11)
    assert abs(error) < 1


@driver
def test_watch_gives_every_figure() -> None:
    """A smoke run of bench/watch.py measures every row of both its tables."""
    own, pairs = tables("watch.py")
    assert [len(own), len(pairs)] == [12, 12]
    for cells in own:
        average, middle, p99, longest = map(float, cells[2:6])
        assert 0 < average <= longest + 1, cells
        assert 0 < middle <= p99 + 1 <= longest + 2, cells
    for cells in pairs:
        assert min(float(cells[3]), float(cells[4])) > 10, cells
