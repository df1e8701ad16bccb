"""Alert senders of the daemon: non-blocking, grouped, rate-limited, retried, and persistent over a restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alert_samples import alert, gpu_down, gpu_hot, near_oom, xid
from message_receivers import HttpReceiver, http_receiver, silent_receiver
from services import wait_until

from gpuwarden.alerts.delivery import queue as queue_module
from gpuwarden.alerts.delivery import sender
from gpuwarden.alerts.delivery.dispatcher import Dispatcher, message_targets
from gpuwarden.alerts.delivery.message import Message
from gpuwarden.alerts.delivery.persistence import SentAlerts
from gpuwarden.alerts.delivery.target import DeliveryError, MessageTarget, Policy
from gpuwarden.config.schema import Config, NotifyConfig
from gpuwarden.config.secrets import Secret
from gpuwarden.health import detector
from gpuwarden.health.detector import Resolution
from gpuwarden.state import Alert, DeliveryCounts, Detection, State
from snapshots import snapshot

SECRET = "T0KEN-xoxb-1234567890"  # noqa: S105 - of a test
NOTHING = State("nvml", 1.0, snapshot(), ())
FROM_NOTIFY = Policy.from_notify
FAST = NotifyConfig(group_wait=0.05, resolve_after=0.05, timeout=5, max_per_hour=3600)


def webhook_settings(*servers: HttpReceiver, settings: NotifyConfig = FAST) -> NotifyConfig:
    """Return settings with a webhook for each server."""
    return replace(settings, webhook=tuple(Secret(text=server.url) for server in servers))


class ScriptedDispatcher(Dispatcher):
    """Dispatcher whose alerts the test sets."""

    def __init__(self, config: Config, folder: Path | None, targets: Iterable[MessageTarget] | None = None) -> None:
        super().__init__(config, folder, targets)
        self._resolution = Resolution()

    def fire(self, *firing: Alert) -> None:
        """Dispatch a poll in which these alerts fire."""
        now = time.monotonic()
        self._resolution.restore(self.pop_restored(), now, time.time())
        unconfirmed, resolved = self._resolution.evaluate(firing, (), NOTHING, now)
        self.dispatch(Detection(firing=firing, unconfirmed=unconfirmed, resolved=resolved))


def dispatcher(
    settings: NotifyConfig, folder: Path | None = None, targets: list[MessageTarget] | None = None
) -> ScriptedDispatcher:
    """Start a dispatcher whose alerts the test sets."""
    sink = ScriptedDispatcher(Config(notify=settings), folder, targets)
    sink.start()
    return sink


@contextlib.contextmanager
def notifier(settings: NotifyConfig, folder: Path | None = None) -> Iterator[ScriptedDispatcher]:
    """Run a dispatcher, and stop it."""
    sink = dispatcher(settings, folder)
    try:
        yield sink
    finally:
        asyncio.run(sink.stop())


def fast_retry_policy(settings: NotifyConfig, min_severity: str) -> Policy:
    """Return the policy of a target, with short retry intervals."""
    return replace(FROM_NOTIFY(settings, min_severity), first_retry=0.01, max_retry=0.02)


def names(content: Any, key: str = "firing") -> list[tuple[str, str]]:
    """Return the alerts of a body with their GPUs."""
    return [(each["alert"], each["labels"]["gpu"]) for each in content[key]]


def test_simultaneous_alerts_are_one_message() -> None:
    """Alerts that fire together are one message; the end of all is one more."""
    with http_receiver() as server, notifier(webhook_settings(server)) as sink:
        sink.fire(gpu_down(1))
        sink.fire(gpu_down(1), gpu_down(2), gpu_hot(3))
        first = server.receive().content
        assert names(first) == [("GpuDown", "1"), ("GpuDown", "2"), ("GpuNearThermalSlowdown", "3")]
        sink.fire()
        last = server.receive().content
        assert (last["firing"], len(last["over"])) == ([], 3)
        wait_until(lambda: sink.notified == {"webhook": DeliveryCounts(2, 0, 0)}, "both are counted")


def test_hanging_target_blocks_nothing_else() -> None:
    """A hanging target blocks neither the other target, nor the poll, nor the stop of the daemon."""
    with http_receiver() as server, silent_receiver() as port:
        hangs = Secret(text=f"http://127.0.0.1:{port}/")
        settings = replace(webhook_settings(server), webhook=(hangs, Secret(text=server.url)), timeout=60)
        with notifier(settings) as sink:
            for index in range(3):
                sink.fire(*(gpu_down(i) for i in range(index + 1)))
                assert names(server.receive().content) == [("GpuDown", str(index))]
            wait_until(
                lambda: sink.notified == {"webhook": DeliveryCounts(0, 0, 0), "webhook-2": DeliveryCounts(3, 0, 0)},
                "they are counted",
            )


def test_slow_delivery_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A message that takes too long is counted and logged once."""
    monkeypatch.setattr(sender, "STUCK_SECONDS", 0.1)
    with http_receiver() as server, notifier(webhook_settings(server)) as sink:
        server.may_answer.clear()

        def counted() -> bool:
            sink.fire(gpu_down())
            return sink.notified["webhook"].failed > 0

        wait_until(counted, "it is counted")
        sink.fire(gpu_down())
        server.may_answer.set()
        assert names(server.receive().content) == [("GpuDown", "3")]
        wait_until(lambda: sink.notified["webhook"] == DeliveryCounts(1, 1, 0), "it was delivered")
    assert len([record for record in caplog.records if "no result after" in record.getMessage()]) == 1


def test_retry_sends_everything_in_one_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failing target gets everything later in one message; the failure and its end are logged once each."""
    monkeypatch.setattr(Policy, "from_notify", fast_retry_policy)
    caplog.set_level(logging.INFO)
    with http_receiver() as server, notifier(webhook_settings(server)) as sink:
        server.status = 500
        sink.fire(gpu_down(1))
        wait_until(lambda: sink.notified["webhook"].failed >= 3, "three failures")
        sink.fire(gpu_down(1), gpu_down(2))
        before = sink.notified["webhook"].failed
        wait_until(
            lambda: sink.notified["webhook"].failed >= before + 2,
            "the pending message failed, and one with both alerts",
        )
        server.status = 200
        assert names(server.receive().content) == [("GpuDown", "1"), ("GpuDown", "2")]
        wait_until(lambda: sink.notified["webhook"].sent == 1, "it is counted")
    faults = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert faults == ['notification not sent target="webhook at 127.0.0.1" reason="HTTP status 500: ok"']
    assert any("notification delivery works again" in record.getMessage() for record in caplog.records)


def test_rejected_message_waits_long() -> None:
    """A target that rejects a message is not retried at once."""
    with http_receiver() as server, notifier(webhook_settings(server)) as sink:
        server.status = 404
        sink.fire(gpu_down())
        wait_until(lambda: sink.notified["webhook"].failed == 1, "the failure")
        (each,) = sink._senders
        wait_until(lambda: each._wait_until > time.monotonic() + 200, "it waits")
        assert server.request_count == 1


def test_alert_burst_is_rate_limited() -> None:
    """A burst of alerts sends as many messages as allowed; the rest wait and share the next one."""
    settings = replace(FAST, group_wait=0.0, max_per_hour=8)  # two at once, then one every 450 s
    with http_receiver() as server, notifier(webhook_settings(server, settings=settings)) as sink:
        alerts = []
        for index in range(200):
            alerts.append(replace(gpu_hot(index), description=f"GPU {index}"))
            sink.fire(*alerts)
            if index < 2:
                wait_until(lambda count=index + 1: sink.notified["webhook"].sent == count, "it is sent")  # type: ignore[misc]
        (each,) = sink._senders
        with each._turn:
            assert each._next_message()[0] > time.monotonic() + 300
            assert len(each._queue.next_notifications(time.monotonic(), time.time())) == 198
        assert server.request_count == 2
        sink.fire(*alerts, xid(1))  # critical alerts have their own rate limit, and the waiting ones join
        contents = [server.receive().content for _ in range(3)]
        assert (len(contents[2]["firing"]), names(contents[2])[0]) == (199, ("GpuXidCritical", "1"))


def test_new_critical_alerts_are_rate_limited() -> None:
    """Critical alerts of a job that crashes again and again use both limits; further ones wait and share a message."""
    settings = replace(FAST, group_wait=0.0, max_per_hour=8)  # each limit: two at once, then one every 450 s
    with http_receiver() as server, notifier(webhook_settings(server, settings=settings)) as sink:
        (each,) = sink._senders
        runs: list[Alert] = []

        def is_spent() -> bool:
            runs.append(replace(near_oom(), labels={**near_oom().labels, "run_id": f"{len(runs)}-1"}))
            sink.fire(*runs)
            with each._turn:
                return each._queue.has_new and each._next_message()[0] > time.monotonic() + 300

        wait_until(is_spent, "both limits are used up")
        for _ in range(100):
            is_spent()
        assert server.request_count == sink.notified["webhook"].sent == 4
        with each._turn:
            waiting = each._queue.next_notifications(time.monotonic(), time.time())
        assert len(waiting) > 100


def test_unsent_alerts_are_sent_at_stop() -> None:
    """Unsent alerts are sent when the daemon stops."""
    with http_receiver() as server:
        with notifier(replace(webhook_settings(server), group_wait=600)) as sink:
            sink.fire(gpu_down())
        assert names(server.receive().content) == [("GpuDown", "3")]


def test_restart_does_not_send_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart, only new alerts and the ends of earlier ones are sent."""
    monkeypatch.setattr(queue_module, "RESTORED_SECONDS", 0.0)
    monkeypatch.setattr(detector, "RESTORED_SECONDS", 0.0)
    with http_receiver() as server:
        with notifier(webhook_settings(server), tmp_path / "sent") as sink:
            sink.fire(gpu_down(1), near_oom())
            server.receive()
            wait_until((tmp_path / "sent/webhook.json").exists, "the sent alerts are saved")
        with notifier(replace(webhook_settings(server), resolve_after=1.0), tmp_path / "sent") as sink:
            sink.fire()
            sink.fire(gpu_down(1), gpu_down(2))
            assert names(server.receive().content) == [("GpuDown", "2")]
            assert names(server.receive().content, "over") == [("RunNearOutOfMemory", "3")]


def test_new_address_gets_every_alert(tmp_path: Path) -> None:
    """After an address is corrected, the right target gets every alert; the stored state shows neither address."""
    address = tmp_path / "address"

    def start() -> contextlib.AbstractContextManager[ScriptedDispatcher]:
        return notifier(replace(FAST, webhook=(Secret(file=address),)), tmp_path / "sent")

    with http_receiver() as wrong, http_receiver() as right:
        address.write_text(f"{wrong.url}/{SECRET}")
        with start() as sink:
            sink.fire(gpu_down(1))
            wrong.receive()
            wait_until((tmp_path / "sent/webhook.json").exists, "the sent alerts are saved")
        address.write_text(f"{right.url}/{SECRET}")
        with start() as sink:
            sink.fire(gpu_down(1))
            assert "GPU 1 " in right.receive().content["text"]
            wait_until(lambda: sink.notified["webhook"].sent == 1, "it is counted")
        address.unlink()
        with start() as sink:  # the address is unknown, so nothing is sent twice
            sink.fire(gpu_down(1))
            (each,) = sink._senders
            wait_until(lambda: list(each._queue.sent(0.0)), "the alerts sent before are restored")
            address.write_text(f"{right.url}/{SECRET}")
            sink.fire(gpu_down(1), gpu_down(2))
            assert "GPU 1 " not in right.receive().content["text"]
        kept = (tmp_path / "sent/webhook.json").read_text()
        assert SECRET not in kept
        assert str(right.port) not in kept


def test_address_digest(tmp_path: Path) -> None:
    """The digest of each kind of target depends on its address."""
    one, other = Secret(text=f"https://a/{SECRET}"), Secret(text=f"https://b/{SECRET}")
    for pair in (
        [NotifyConfig(webhook=(each,)) for each in (one, other)],
        [NotifyConfig(apprise=(each,)) for each in (one, other)],
    ):
        was, became = (next(iter(message_targets(Config(notify=each)))).address_digest() for each in pair)
        assert was
        assert became
        assert was != became
        assert SECRET not in was
    (absent,) = message_targets(Config(notify=replace(FAST, webhook=(Secret(file=tmp_path / "absent"),))))
    assert absent.address_digest() is None


def test_sent_alerts_belong_to_one_address(tmp_path: Path) -> None:
    """Sent alerts of another address are not restored; a changed address counts from the next start."""

    def read(digest: str | None) -> list[tuple[Alert, float]]:
        return SentAlerts(tmp_path, "mail", lambda: digest).read(wall=1000.0)

    sent = [(gpu_down(), 0.0)]
    SentAlerts(tmp_path, "mail").write(sent, wall=1000.0)  # as older daemons wrote it
    digests = ["aaaa"]
    first = SentAlerts(tmp_path, "mail", lambda: digests[0])
    assert first.read(wall=1000.0) == sent
    digests[0] = "bbbb"
    first.write(sent, wall=1000.0)
    assert [read(each) for each in ("aaaa", None, "bbbb")] == [sent, sent, []]


def test_sent_alerts_are_restored(tmp_path: Path) -> None:
    """Sent alerts are restored with their age; a clock that was set back makes the age 0."""
    died = alert("RunDied", {"outcome": "killed"}, "Run “a”\nended.", 5.0, "alice", last=6.0)
    SentAlerts(tmp_path, "mail").write([(died, 60.0), (gpu_down(), 0.0)], wall=1000.0)
    expected = replace(died, description="Run “a” ended.")
    assert SentAlerts(tmp_path, "mail").read(wall=1030.0) == [(expected, 90.0), (gpu_down(), 30.0)]
    assert SentAlerts(tmp_path, "mail").read(wall=950.0) == [(expected, 10.0), (gpu_down(), 0.0)]
    assert SentAlerts(None, "mail").read(wall=950.0) == []


def test_corrupt_file_is_ignored(tmp_path: Path) -> None:
    """A corrupt file is ignored."""
    SentAlerts(tmp_path, "webhook").write([(gpu_down(), 0.0)], wall=1000.0)
    written = (tmp_path / "webhook.json").read_text()
    assert '"told": 1000.0' in written
    times = [written.replace('"told": 1000.0', f'"told": {each}') for each in ("NaN", "1e300", "9" * 400)]
    for content in ("", "[]", '{"version": 2}', '{"version": 1, "alerts": [{}]}', "\0" * 100, *times):
        (tmp_path / "webhook.json").write_text(content)
        assert SentAlerts(tmp_path, "webhook").read(1000.0) == []


def test_unwritable_state_stops_no_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a writable state folder alerts are still sent, and the problem is logged once."""
    (tmp_path / "file").write_text("")
    with http_receiver() as server, notifier(webhook_settings(server), tmp_path / "file" / "sent") as sink:
        for index in (1, 2):
            sink.fire(*(gpu_down(i) for i in range(index)))
            server.receive()
        wait_until(lambda: sink.notified["webhook"].sent == 2, "both are sent")
    assert len([record for record in caplog.records if "cannot save notifications" in record.getMessage()]) == 1


def test_exception_in_a_target_is_isolated(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An exception in one target is logged once and retried like any other failure."""
    monkeypatch.setattr(Policy, "from_notify", fast_retry_policy)
    sent: list[Message] = []

    class Faulty(MessageTarget):
        def _deliver(self, message: Message) -> None:
            sent.append(message)
            if len(sent) == 1:
                raise ZeroDivisionError(SECRET)
            if len(sent) == 2:
                raise DeliveryError("not yet")

    faulty = Faulty("faulty", "a faulty one", Secret(text=SECRET), Config(notify=FAST), "info")
    sink = dispatcher(FAST, None, [faulty])
    sink.fire(gpu_down())
    wait_until(lambda: sink.notified["faulty"].sent == 1, "the third attempt succeeds")
    asyncio.run(sink.stop())
    assert sink.notified["faulty"].failed == 2
    said, _not_yet = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.startswith(
        'notification not sent target="a faulty one" reason="bug in gpuwarden, please report it: ZeroDivisionError in '
    )
    assert re.search(r" > tests\.alerts\.delivery\.test_sender\._deliver:\d+\"$", said)
    assert SECRET not in caplog.text
