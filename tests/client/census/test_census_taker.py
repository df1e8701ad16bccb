"""Moment of a census: advice on memory or a leak, at most once a minute, and only where it is switched on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from receiver import Receiver
from run_socket_fixtures import HELLO

from gpuwarden import watch
from gpuwarden.client.advice_state import AdviceState
from gpuwarden.client.census import take_census
from gpuwarden.client.census.take_census import MIN_INTERVAL_SECONDS, CensusTaker
from gpuwarden.client.connection import DaemonConnection
from gpuwarden.client.reporter import Reporter
from gpuwarden.protocol.messages import Advice, Census, Error, Hello

LEAK = Advice(1, "leak", "warning", "GPU-5", "leak of 1 MiB a minute")
PRESSURE = Advice(1, "pressure", "critical", "GPU-5", "Low.", "memory")
CENSUS = Census(7, 0.1, 1, 4, groups=())


class Censuses:
    """Stand-in for the census itself: records the steps of the calls, and may fail."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.error: Exception | None = None

    def __call__(self, steps: int, _in_use: int | None) -> Census:
        """Return a census."""
        self.taken.append(steps)
        if self.error:
            raise self.error
        return CENSUS


@pytest.fixture
def censuses(monkeypatch: pytest.MonkeyPatch) -> Censuses:
    """Replace the census."""
    stand_in = Censuses()
    monkeypatch.setattr(take_census, "take_census", stand_in)
    return stand_in


@pytest.mark.parametrize("advice", [LEAK, PRESSURE])
def test_one_census_for_each_advice(advice: Advice, censuses: Censuses) -> None:
    """Advice on memory makes one due; that within a minute of another waits for the minute's end."""
    taker = CensusTaker()
    assert taker.take_if_due(1, None, 0.0) is None
    taker.handle_advice(advice)
    assert taker.take_if_due(2, None, 10.0) == CENSUS
    assert taker.take_if_due(3, None, 11.0) is None
    taker.handle_advice(advice)
    assert taker.take_if_due(4, None, 10.0 + MIN_INTERVAL_SECONDS - 1) is None
    assert taker.take_if_due(5, None, 10.0 + MIN_INTERVAL_SECONDS) == CENSUS
    assert taker.take_if_due(6, None, 1e6) is None
    assert censuses.taken == [2, 5]


@pytest.mark.parametrize(
    "advice",
    [
        Advice(1, "pressure", "none", "GPU-5", "", "memory"),
        Advice(1, "pressure", "critical", "GPU-5", "", "thermal"),
        Advice(1, "xid", "critical", "GPU-5", ""),
    ],
)
def test_other_advice_makes_none_due(advice: Advice, censuses: Censuses) -> None:
    """Memory that is no longer low, heat and faults need no census."""
    taker = CensusTaker()
    taker.handle_advice(advice)
    assert taker.take_if_due(1, None, 0.0) is None
    assert censuses.taken == []


def test_census_that_fails_is_the_last(censuses: Censuses) -> None:
    """Nothing is raised, and no further one is taken."""
    taker, censuses.error = CensusTaker(), ValueError("of the census")
    for now in (0.0, 1e6):
        taker.handle_advice(LEAK)
        assert taker.take_if_due(1, None, now) is None
    assert censuses.taken == [1]


def test_leak_causes_no_action() -> None:
    """Advice on a leak is logged, and is neither pressure nor an event that `on_pressure` answers."""
    state = AdviceState()
    state.handle(LEAK, 0.0)
    assert (state.count, state.pressure, state.pop_unanswered("stop", "warning", 0.0)) == (1, "none", [])


def test_out_of_memory_takes_one(daemon: Receiver, connection: DaemonConnection, censuses: Censuses) -> None:
    """A device's out-of-memory that a step raised takes a census at once; another error, or the run's end, none."""
    run = Reporter(connection)
    run.report(0)
    peer = daemon.accept()
    run.census = CensusTaker()
    run.report_error(Error("other", "ValueError", "", "train", 1))
    run.report_error(Error("device_oom", "ResourceExhaustedError", "", "train", 1))
    run.end()
    kinds = [type(message).__name__ for message in peer.waiting()]
    assert kinds == ["Hello", "Report", "Error", "Report", "Error", "Census", "Report", "Report", "End"]
    assert censuses.taken == [0]


@pytest.mark.parametrize(
    ("argument", "variable", "expected"), [(True, "0", True), (None, "1", True), (False, "1", False)]
)
def test_the_switch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argument: bool | None,  # noqa: FBT001 - pytest's
    variable: str,
    expected: bool,  # noqa: FBT001 - likewise
) -> None:
    """The argument, or else GPUWARDEN_CENSUS=1: the hello has it. Anything but a bool is refused."""
    monkeypatch.setenv("GPUWARDEN_CENSUS", variable)
    receiver = Receiver(tmp_path / "run.sock")
    with watch(socket=receiver.path, census=argument) as run:
        run.step()
        hello = receiver.accept().waiting()[0]
    receiver.close()
    assert isinstance(hello, Hello)
    assert hello.census is expected
    with pytest.raises(TypeError, match="census: 'yes' is not a bool"):
        watch(census="yes")  # type: ignore[arg-type]


def test_without_the_switch_nothing_is_loaded() -> None:
    """The census costs no import where it is off."""
    script = "import sys, gpuwarden; gpuwarden.watch(); print([m for m in sys.modules if m.endswith('take_census')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert not HELLO.census
