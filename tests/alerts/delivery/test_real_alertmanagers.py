"""Delivery to real Alertmanagers over restarts, refusals, clock differences and in large numbers."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest
from alert_samples import alert
from services import Alertmanager, end_processes, free_port, wait_until

from tests.alerts.delivery.test_alertmanager_target import NEAR, STALLED, resending_dispatcher

pytestmark = pytest.mark.system


def test_alert_is_delivered_and_resolved(tmp_path: Path) -> None:
    """Alertmanager has the alert while it is re-sent, and not after it ends."""
    receiver = Alertmanager(tmp_path)
    url = f"http://{receiver.address}"
    with end_processes(receiver), resending_dispatcher(url) as sink:
        sink.fire(NEAR, STALLED)
        wait_until(lambda: len(receiver.alerts()) == 2, "both alerts")
        assert {each["annotations"]["summary"] for each in receiver.alerts()} == {
            "Run u & net on GPU 0 of 127.0.0.1:9846 is almost out of GPU memory",
            "Run 7-1 on 127.0.0.1:9846 is stalled: no step",
        }
        wait_until(lambda: sink.posted[url].sent >= 4, "both alerts, re-sent")
        sink.fire(STALLED)
        wait_until(
            lambda: [a["labels"]["alertname"] for a in receiver.alerts()] == ["RunStalled"], "the resolved alert"
        )
        assert (sink.posted[url].failed, sink.posted[url].dropped) == (0, 0)


@pytest.mark.parametrize("ahead", [-600.0, 600.0])
def test_clock_difference(
    tmp_path: Path, ahead: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Timestamps follow Alertmanager's clock, so it takes no alert as ended and no end as a future one."""
    real = time.time
    receiver = Alertmanager(tmp_path)
    with end_processes(receiver), resending_dispatcher(f"http://{receiver.address}") as sink:
        monkeypatch.setattr("gpuwarden.alerts.delivery.alertmanager.time.time", lambda: real() + ahead)
        alert = replace(NEAR, since=real() + ahead)
        sink.fire(alert)
        soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(real() + 60))
        wait_until(
            lambda: [alert for alert in receiver.alerts() if alert["startsAt"] < soon],
            "the alert, with a start in the past",
        )
        sink.fire()
        wait_until(lambda: not receiver.alerts(), "the resolved alert")
    assert caplog.text.count("clock of the Alertmanager differs") == 1


def test_alert_expires_without_the_daemon(tmp_path: Path) -> None:
    """Alertmanager resolves an alert that is not re-sent for four intervals."""
    receiver = Alertmanager(tmp_path)
    with end_processes(receiver):
        with resending_dispatcher(f"http://{receiver.address}") as sink:
            sink.fire(NEAR)
            wait_until(receiver.alerts, "the alert")
        assert receiver.alerts()
        wait_until(lambda: not receiver.alerts(), "the resolved alert")


def test_alertmanager_restarts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An unreachable Alertmanager is retried, counted and logged once; after a restart it gets what fires."""
    caplog.set_level(logging.INFO)
    address = f"127.0.0.1:{free_port()}"
    with resending_dispatcher(f"http://{address}") as sink:
        sink.fire(NEAR)
        wait_until(lambda: sink.posted[f"http://{address}"].failed > 1, "delivery attempts")
        receiver = Alertmanager(tmp_path, address=address)
        with end_processes(receiver):
            wait_until(receiver.alerts, "the alert")
            receiver.kill()
        wait_until(lambda: caplog.text.count("notification not sent") == 2, "the second failure in the log")
        again = Alertmanager(tmp_path, address=address)
        with end_processes(again):
            wait_until(again.alerts, "the alert again")
            wait_until(lambda: caplog.text.count("delivery works again") == 2, "both recoveries in the log")
    assert caplog.text.count(f'notification not sent target=http://{address} reason="Connection refused"') == 2


def test_rejected_alert_does_not_block_the_others(tmp_path: Path) -> None:
    """Alertmanager rejects one alert for an invalid label, accepts the rest, and is not retried at once."""
    wrong = alert("RunStalled", {"no label": "x"}, "", 1.0e9)
    receiver = Alertmanager(tmp_path)
    url = f"http://{receiver.address}"
    with end_processes(receiver), resending_dispatcher(url) as sink:
        sink.fire(wrong, NEAR)
        wait_until(receiver.alerts, "the accepted alert")
        wait_until(lambda: sink.posted[url].failed, "the rejection")


def test_thousand_alerts(tmp_path: Path) -> None:
    """A thousand alerts and their ends are sent in messages of bounded size."""
    many = [alert("RunStalled", {"run_id": str(number)}, "x" * 500, 1.0e9) for number in range(1000)]
    receiver = Alertmanager(tmp_path)
    with end_processes(receiver), resending_dispatcher(f"http://{receiver.address}") as sink:
        sink.fire(*many)
        wait_until(lambda: len(receiver.alerts()) == len(many), "all alerts")
        sink.fire()
        wait_until(lambda: not receiver.alerts(), "the resolved alerts")
