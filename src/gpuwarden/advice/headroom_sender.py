"""Sender of headroom to the runs that log it."""

from __future__ import annotations

from collections.abc import Callable

from gpuwarden.host.process_key import ProcessKey
from gpuwarden.pressure.levels import Pressure
from gpuwarden.protocol.messages import Headroom, Reply
from gpuwarden.runs.run_snapshot import JoinedPoll


class HeadroomSender:
    """Sender of headroom, at most once a poll, to each run that requested it.

    A run gets a message only after a new report, so that a run that hangs does not fill its connection. A message that
    the connection does not take is dropped: the next report brings another. Used by one event loop.
    """

    def __init__(self, send: Callable[[ProcessKey, Reply], bool]) -> None:
        self._send = send
        self._answered: dict[str, float | None] = {}  # time of the last answered report, by run id

    def send_headroom(self, poll: JoinedPoll, pressure: Pressure) -> None:
        """Send the headroom of a poll, the smallest of the run's devices. Does not block."""
        wanted = [run for run in poll.runs if run.up and run.hello.headroom and run.hello.hears]
        for run in wanted:
            if run.last_report != self._answered.get(run.peer.run_id):
                left = [each.headroom for (run_id, _), each in pressure.of_runs.items() if run_id == run.peer.run_id]
                self._send(run.peer, Headroom(max(0, round(min(left))) if left else None))
        self._answered = {run.peer.run_id: run.last_report for run in wanted}
