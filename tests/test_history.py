"""What is kept of a run's memory stays bounded and true, however long the run lasts."""

from dataclasses import replace

from gpuwarden.protocol import STEP_BUCKETS, DeviceMemory, Phase, Report
from gpuwarden.runs.history import MOST_EPOCHS, MOST_WINDOWS, MemoryHistory

MIB = 1 << 20
REPORT = Report("train", 0, 0.0, (0,) * (len(STEP_BUCKETS) + 1), {})


def told(history: MemoryHistory, at: float, current: int, *, peak: int | None = None, **changes: object) -> None:
    """Have the history hear one report."""
    report = replace(REPORT, **changes)  # type: ignore[arg-type] # fields of a report
    history.hear(DeviceMemory(current, current if peak is None else peak), report, at)


def test_a_long_run_is_kept_in_few_windows() -> None:
    """A day of reports fits in as many windows as a minute, and no low or high of it is lost."""
    history = MemoryHistory()
    reports = 40_000
    for each in range(reports):
        current = 100 * MIB if each != 31_234 else 7 * MIB
        told(history, each * 0.25, current if each != 2_222 else 900 * MIB, steps=each)
    windows = history.windows
    assert MOST_WINDOWS / 2 <= len(windows) <= MOST_WINDOWS
    assert sum(window.reports for window in windows) == reports
    assert [min(each.lowest for each in windows), max(each.highest for each in windows)] == [7 * MIB, 900 * MIB]
    assert all(one.ended == other.began and one.steps < other.steps for one, other in zip(windows, windows[1:]))  # noqa: B905, RUF007 - Python 3.10
    assert (windows[0].began, windows[-1].ended, windows[-1].steps) == (0, (reports - 1) * 0.25, reports - 1)


def test_short_epochs_leave_the_past_as_it_was() -> None:
    """Each epoch begins a window; a day of short ones must not melt into one, nor make those of later ones endless."""
    history = MemoryHistory()
    for each in range(80_000):
        told(history, each * 0.25, 100 * MIB, steps=each, epoch=each // 4)
    windows = history.windows
    assert MOST_WINDOWS / 2 <= len(windows) <= MOST_WINDOWS
    assert max(each.ended - each.began for each in windows) <= 20_000 / 50
    for each in range(80_000, 88_000):
        told(history, each * 0.25, 100 * MIB, steps=each, epoch=20_000)
    assert len([each for each in history.windows if each.epoch == 20_000]) > 4


def test_epochs_are_kept_once_they_have_ended() -> None:
    """Each epoch has its own least, and many epochs share entries evenly."""
    history = MemoryHistory()
    for each in range(40):
        told(history, each, (each % 4 + each // 4) * MIB, epoch=each // 4)
    assert [each.epoch for each in history.epochs] == list(range(9))
    assert [each.lowest for each in history.epochs] == [number * MIB for number in range(9)]
    for each in range(40, 40_000):
        told(history, each, each // 4 * MIB, epoch=each // 4)
    assert MOST_EPOCHS / 2 <= len(history.epochs) <= MOST_EPOCHS
    assert {each.reports for each in history.epochs[:-1]} == {history.epochs[0].reports}
    assert sum(each.reports for each in history.epochs) == 40_000 - 4


def test_growth_is_laid_to_the_phase_it_happened_in() -> None:
    """A validation shorter than a report's interval keeps its growth: its begin and its end are reported."""
    history = MemoryHistory()
    current, at = 100 * MIB, 0.0
    phases: tuple[tuple[Phase, int], ...] = (("train", 0), ("test", 3 * MIB))
    for _ in range(5):
        for phase, grows in phases:
            told(history, at, current, peak=current + 50 * MIB, phase=phase)
            current, at = current + grows, at + 0.1
    assert history.phases["test"].grown == 4 * 3 * MIB
    assert history.phases["train"].grown == 0
    assert history.phases["test"].peak == 162 * MIB


def test_polls_add_what_the_driver_knows() -> None:
    """The least headroom and the most that others held, of all polls of a window."""
    history = MemoryHistory()
    history.see(1.0, 2.0)  # before the first report there is no window
    told(history, 0.0, MIB)
    history.see(500.0, None)
    history.see(300.0, 70.0)
    history.see(None, 60.0)
    assert (history.windows[-1].headroom, history.windows[-1].others) == (300.0, 70.0)
