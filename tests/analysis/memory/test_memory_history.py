"""History of a run's memory: windows of reports, poll figures, and the peak of training."""

from dataclasses import replace

from gpuwarden.analysis.memory.memory_history import MemoryHistory
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, Report

MIB = 1 << 20
REPORT = Report("train", 0, 0.0, (0,) * (len(STEP_BUCKETS) + 1), {})


def report(history: MemoryHistory, at: float, current: int, peak: int | None = None, **changes: object) -> None:
    """Add one report."""
    memory = DeviceMemory(current, current if peak is None else peak)
    history.add_report(memory, replace(REPORT, **changes), at)  # type: ignore[arg-type] # fields of a report


def test_reports_of_a_window() -> None:
    """A window has the lowest and highest memory in use, the peak at the lowest, the largest batch, the last epoch."""
    history = MemoryHistory()
    report(history, 3.0, 7 * MIB, 20 * MIB, steps=1, batch_size=64, epoch=0)
    report(history, 3.2, 5 * MIB, 30 * MIB, steps=2, batch_size=32, epoch=0)
    report(history, 3.4, 6 * MIB, 40 * MIB, steps=3, batch_size=None, epoch=1)
    (window,) = history.windows
    assert (window.began, window.ended, window.steps, window.epoch, window.batch_size) == (3.0, 3.4, 3, 1, 64)
    assert (window.lowest, window.highest, window.peak) == (5 * MIB, 7 * MIB, 40 * MIB)
    assert (window.lowest_at, window.peak_at_lowest) == (3.2, 30 * MIB)
    report(history, 9.0, 6 * MIB, steps=4)
    assert [(each.began, each.ended) for each in history.windows] == [(3.0, 3.4), (3.4, 9.0)]


def test_growth_in_steps() -> None:
    """The peak is that of the last steps once it has risen with the memory in use in four reports with new steps."""
    history = MemoryHistory()
    for number in range(5):
        assert not history.grows_in_steps
        report(history, float(number), number * MIB, (number + 30) * MIB, steps=10 * number + 1)
    assert history.grows_in_steps
    report(history, 5.0, 4 * MIB, 34 * MIB, steps=41)  # a long step: no news
    assert history.grows_in_steps
    report(history, 6.0, 5 * MIB, 34 * MIB, steps=42)  # the peak is an old one
    assert not history.grows_in_steps


def test_training_begins_with_a_step() -> None:
    """Building the model is not part of training; its evaluation is."""
    made, evaluated = MemoryHistory(), MemoryHistory()
    report(made, 1.0, MIB)
    report(made, 5.0, MIB, steps=1)
    report(made, 6.0, MIB, steps=2)
    report(evaluated, 2.0, MIB, phase="test")
    assert (made.training_began, evaluated.training_began) == (5.0, 2.0)


def test_the_peak_of_training_is_not_that_of_a_validation() -> None:
    """A rise counts to the phase of the previous report, as a new phase is reported when it starts."""
    history = MemoryHistory()
    report(history, 0.0, 5 * MIB, 10 * MIB)
    report(history, 0.1, 5 * MIB, 20 * MIB, phase="test")
    report(history, 0.2, 5 * MIB, 90 * MIB, phase="test")
    report(history, 0.3, 5 * MIB, 95 * MIB)
    assert history.training_peak == 20 * MIB


def test_polls_add_the_drivers_figures() -> None:
    """A window has the lowest headroom and the most memory of others; the limit is that of the last poll."""
    history = MemoryHistory()
    history.add_poll(1.0, 2.0)  # before the first report there is no window
    report(history, 0.0, MIB)
    history.add_poll(500.0, None)
    history.add_poll(300.0, 70.0)
    history.add_poll(None, 60.0)
    assert (history.windows[-1].headroom, history.windows[-1].others) == (300.0, 70.0)
    assert history.limit is None
    history.add_poll(400.0, 60.0)
    assert history.limit == 400.0 + MIB
