"""Arguments of the watch and of its steps: batch sizes, losses, and values that are none."""

from __future__ import annotations

from typing import Any

import pytest
from receiver import MAX_WAIT_SECONDS, Receiver
from watch_stage import list_reports, read_last_report

from gpuwarden import watch


@pytest.mark.parametrize(
    ("settings", "error", "name"),
    [
        ({"interval": float("nan")}, ValueError, "interval"),
        ({"interval": -1}, ValueError, "interval"),
        ({"interval": "1"}, TypeError, "interval"),
        ({"interval": True}, TypeError, "interval"),
        ({"interval": 10**400}, ValueError, "interval"),
        ({"disabled": "false"}, TypeError, "disabled"),
        ({"name": 3}, TypeError, "name"),
        ({"socket": 3}, TypeError, "socket"),
        ({"devices": ["GPU:0"]}, TypeError, "devices"),
        ({"devices": {"GPU:0": 1}}, TypeError, "devices"),
        ({"devices": {"cuda:0": "GPU-a"}}, ValueError, "devices"),
        ({"framework": "keras"}, ValueError, "framework"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], error: type[Exception], name: str) -> None:
    """A wrong argument is refused at once, by its name."""
    with pytest.raises(error, match=f"^{name}: "):
        watch(**settings)


class Tensor:
    """An object whose value must not be read: that would wait for the device."""

    def __float__(self) -> float:
        raise AssertionError("asked for its value")

    __index__ = __int__ = __repr__ = __bool__ = __gt__ = __float__  # type: ignore[assignment] # none may be called


def test_batch_sizes(daemon: Receiver) -> None:
    """The last step's size is reported, and the largest of all, even if it came between two reports."""
    with watch() as run:
        for size in (4, 64, 8):
            run.step(batch_size=size)
        run.step()
    report = read_last_report(daemon.accept())
    assert (report.batch_size, report.largest_batch_size) == (8, 64)


def test_step_without_its_batch_size(daemon: Receiver) -> None:
    """The sum of the examples ends with the first step whose examples are unknown: it would be a lower bound."""
    with watch(interval=0) as run:
        sums = []
        for size in (8, 8, None, 8):
            run.step(batch_size=size)
            sums.append(run._loop.run.state.examples)
    assert sums == [8, 16, None, None]
    assert read_last_report(daemon.accept()).examples is None


def test_absurd_batch_size(daemon: Receiver) -> None:
    """A batch size that no message can hold leaves the examples unknown, and the reports go on."""
    with watch() as run:
        run.step(batch_size=8)
        run.epoch(1)
        run.step(batch_size=10**30)
        run.epoch(2)
        run.step(batch_size=8)
    last = list_reports(daemon.accept().waiting())[-1]
    assert (last.steps, last.examples, last.batch_size, last.largest_batch_size) == (3, None, 8, 8)


def test_odd_values(daemon: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """Values that are not numbers on the host are ignored with one line in the log, and the steps count."""
    odd: Any = Tensor()
    with watch() as run:
        for _ in range(3):
            run.step(batch_size=odd, loss=odd)
            run.step(batch_size=-1)
            run.step(batch_size=True)
        run.epoch(odd)
        with run.phase(odd):
            pass
    report = read_last_report(daemon.accept())
    assert (report.steps, report.examples, report.loss, report.epoch) == (9, None, None, None)
    assert [each.partition(":")[0] for each in caplog.messages] == [
        "batch_size",
        "loss",
        "batch_size",
        "epoch",
        "phase",
    ]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(2, 2.0), (float("nan"), None), (float("inf"), None), (1e30, None), pytest.param(10**400, None, id="huge")],
)
def test_loss(daemon: Receiver, loss: float, expected: float | None) -> None:
    """The last loss is reported; one that a message cannot hold is reported as unknown, and no report is lost."""
    with watch() as run:
        run.step(loss=1.0)
        run.step()
        run.step(loss=loss)
    report = read_last_report(daemon.accept())
    assert (report.loss, report.steps) == (expected, 3)


def test_nonfinite_loss(daemon: Receiver) -> None:
    """Steps with a loss of NaN or infinity are counted exactly where each loss is passed, and the first is marked."""
    with watch() as run:
        run.step()
        peer = daemon.accept()
        assert read_last_report(peer).nonfinite_loss is None
        for loss in (1.0, float("nan"), float("inf"), 2.0, float("-inf")):
            run.step(loss=loss)
    found = read_last_report(peer).nonfinite_loss
    assert found is not None
    assert (found.steps, found.max_steps, found.after, found.first, found.current) == (3, 3, 2, 3, True)
    assert 0 <= found.seconds_ago < MAX_WAIT_SECONDS


def test_nonfinite_loss_ends(daemon: Receiver) -> None:
    """A finite loss ends the condition; the count stays."""
    with watch() as run:
        for loss in (float("nan"), 1.0):
            run.step(loss=loss)
    found = read_last_report(daemon.accept()).nonfinite_loss
    assert found is not None
    assert (found.steps, found.after, found.first, found.current) == (1, 0, 1, False)
