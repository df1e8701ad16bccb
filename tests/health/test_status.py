"""Status of the host: it shows what notifications are sent of, and hides what they hide."""

from __future__ import annotations

from dataclasses import replace

from offenders import assert_none

from gpuwarden.alerts.delivery.queue import Queue
from gpuwarden.alerts.delivery.target import Policy
from gpuwarden.config.schema import NotifyConfig
from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.health.detector import Detector
from gpuwarden.health.inhibitions import INHIBITIONS
from gpuwarden.health.model import Condition
from gpuwarden.health.status import box_status
from gpuwarden.state import Alert
from snapshots import gpu
from tests.health.test_detector import OF_GPU, OF_RUN, poll, run

STATE = poll(gpu(0), gpu(1), runs=(run(left=20),))
PAIRS = [
    *((each.source, target) for each in INHIBITIONS for target in each.targets),
    *((each.implied_by, each.name) for each in CONDITIONS.values() if each.implied_by),
]


def holding(name: str, **labels: str) -> Condition:
    """Return a condition that holds for a GPU and a run, or for the host, and fires at once."""
    condition = CONDITIONS[name]
    subject = {} if condition.subject == "box" else {**OF_GPU, **OF_RUN, **labels}
    found = Alert(labels=subject, text="bad", description="It is bad.", since=0.0)
    return replace(condition, check=lambda _state: [found], for_="")


def shown_and_sent(*conditions: Condition) -> tuple[set[str | None], set[str]]:
    """Return the names on the status page and those in the notification of one poll."""
    detection = Detector(conditions).evaluate(STATE, 0.0)
    queue = Queue(Policy.from_notify(NotifyConfig(), "warning"))
    queue.add_detection(detection, 0.0)
    shown = {trouble.alert for trouble in box_status(replace(STATE, detection=detection)).troubles}
    return shown, {each.alert.name for each in queue.next_notifications(0.0, 0.0)}


def test_status_hides_what_notifications_hide() -> None:
    """A problem that another one of its subject explains is on neither; without that one it is on both."""
    assert_none(
        f"{target} of {source}"
        for source, target in PAIRS
        if shown_and_sent(holding(source), holding(target)) != ({source}, {source})
        or shown_and_sent(holding(target)) != ({target}, {target})
    )


def test_problem_of_another_gpu_hides_nothing() -> None:
    """A lost GPU explains the XIDs of its own only."""
    lost, xid = "GpuDown", "GpuXidWarning"
    assert shown_and_sent(holding(lost), holding(xid, uuid="GPU-1")) == ({lost, xid}, {lost, xid})
