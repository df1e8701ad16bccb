"""Delivery to real Alertmanagers: alerts come and end, over restarts, refusals, other clocks and in large numbers."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest
from services import Alertmanager, ending, free_port, until

from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.health.model import Alert
from tests.alerts.delivery.test_alertmanager_target import NEAR, STALLED, see, telling

pytestmark = pytest.mark.system


def test_alertmanager_takes_and_ends_it(tmp_path: Path) -> None:
    """A real one has the alert while it fires, told again, and no more once it is over."""
    receiver = Alertmanager(tmp_path)
    url = f"http://{receiver.address}"
    with ending(receiver), telling(url) as sink:
        see(sink, [NEAR, STALLED])
        until(lambda: len(receiver.alerts()) == 2, "both")
        assert {each["annotations"]["summary"] for each in receiver.alerts()} == {
            NEAR.condition.summary,
            STALLED.condition.summary,
        }
        until(lambda: sink.posted[url].sent >= 4, "both again")
        see(sink, [STALLED])
        until(lambda: [a["labels"]["alertname"] for a in receiver.alerts()] == ["RunStalled"], "the end of one")
        assert (sink.posted[url].failed, sink.posted[url].dropped) == (0, 0)


@pytest.mark.parametrize("ahead", [-600.0, 600.0])
def test_clock_that_differs(
    tmp_path: Path, ahead: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A real one would take an alert for over, or its end for one to come; it is told by its own clock."""
    real = time.time
    receiver = Alertmanager(tmp_path)
    with ending(receiver), telling(f"http://{receiver.address}") as sink:
        monkeypatch.setattr("gpuwarden.alerts.delivery.alertmanager.time.time", lambda: real() + ahead)
        alert = replace(NEAR, since=real() + ahead)
        see(sink, [alert])
        soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(real() + 60))
        until(lambda: [told for told in receiver.alerts() if told["startsAt"] < soon], "the alert, which has begun")
        see(sink, [])
        until(lambda: not receiver.alerts(), "its end")
    assert caplog.text.count("s from this machine's, alerts are sent by it") == 1


def test_alert_ends_by_itself_without_the_daemon(tmp_path: Path) -> None:
    """When nobody tells it again it is over after four times the interval."""
    receiver = Alertmanager(tmp_path)
    with ending(receiver):
        with telling(f"http://{receiver.address}") as sink:
            see(sink, [NEAR])
            until(receiver.alerts, "the alert")
        assert receiver.alerts()
        until(lambda: not receiver.alerts(), "its end")


def test_alertmanager_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While none is there it is tried, counted, and logged once; one that comes has what fires; a restart is no end."""
    caplog.set_level(logging.INFO)
    address = f"127.0.0.1:{free_port()}"
    with telling(f"http://{address}") as sink:
        see(sink, [NEAR])
        until(lambda: sink.posted[f"http://{address}"].failed > 1, "tries")
        receiver = Alertmanager(tmp_path, address=address)
        with ending(receiver):
            until(receiver.alerts, "the alert")
            receiver.kill()
        until(lambda: caplog.text.count("notification not sent") == 2, "its loss in the log")
        again = Alertmanager(tmp_path, address=address)
        with ending(again):
            until(again.alerts, "the alert again")
            until(lambda: caplog.text.count("delivery works again") == 2, "both ends in the log")
    assert caplog.text.count(f'notification not sent target=http://{address} reason="Connection refused"') == 2


def test_alertmanager_that_refuses_one_has_the_others(tmp_path: Path) -> None:
    """A real one refuses a label that is none, and the others of its message are taken; it is not tried in haste."""
    wrong = Alert(CONDITIONS["RunStalled"], {"no label": "x"}, "", 1.0e9)
    receiver = Alertmanager(tmp_path)
    url = f"http://{receiver.address}"
    with ending(receiver), telling(url) as sink:
        see(sink, [wrong, NEAR])
        until(receiver.alerts, "the other")
        until(lambda: sink.posted[url].failed, "the refusal")


def test_huge_numbers(tmp_path: Path) -> None:
    """A thousand alerts come, in messages that are bounded, and their ends."""
    many = [Alert(CONDITIONS["RunStalled"], {"run_id": str(number)}, "x" * 500, 1.0e9) for number in range(1000)]
    receiver = Alertmanager(tmp_path)
    with ending(receiver), telling(f"http://{receiver.address}") as sink:
        see(sink, many)
        until(lambda: len(receiver.alerts()) == len(many), "all")
        see(sink, [])
        until(lambda: not receiver.alerts(), "their ends")
