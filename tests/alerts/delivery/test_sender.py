"""Telling targets from the daemon's side: never blocks, groups, limits, tries again, remembers over a restart."""

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
from alert_samples import gpu_down, gpu_hot, near_oom, xid
from message_receivers import HttpReceiver, http_receiver, silent_receiver
from services import until

from gpuwarden.alerts.delivery import queue as queue_module
from gpuwarden.alerts.delivery import sender
from gpuwarden.alerts.delivery.dispatcher import Dispatcher, message_targets
from gpuwarden.alerts.delivery.message import Message
from gpuwarden.alerts.delivery.persistence import SentAlerts
from gpuwarden.alerts.delivery.target import DeliveryError, MessageTarget, Policy
from gpuwarden.config.schema import Config, NotifyConfig
from gpuwarden.config.secrets import Secret
from gpuwarden.health import evaluator
from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.health.evaluator import AlertStates, Resolution
from gpuwarden.health.model import Alert
from gpuwarden.state import DeliveryCounts, State
from snapshots import snapshot

SECRET = "T0KEN-xoxb-1234567890"  # noqa: S105 - of a test
NOTHING = State("nvml", 1.0, snapshot(), ())
FROM_NOTIFY = Policy.from_notify
FAST = NotifyConfig(group_wait=0.05, resolve_after=0.05, timeout=5, max_per_hour=3600)


def to(*servers: HttpReceiver, settings: NotifyConfig = FAST) -> NotifyConfig:
    """Return settings for webhooks."""
    return replace(settings, webhook=tuple(Secret(text=server.url) for server in servers))


class Fires:
    """Stand-in of the conditions: what fires is what the test says."""

    dropped = 0

    def __init__(self) -> None:
        self.alerts: list[Alert] = []
        self._resolution = Resolution()

    def restore(self, alerts: Iterable[Alert], now: float, wall: float) -> None:
        """Add what was sent before."""
        self._resolution.restore(alerts, now, wall)

    def update(self, state: State, now: float) -> AlertStates:
        """Return what fires, and what of before is confirmed."""
        return AlertStates(self.alerts, *self._resolution.update(self.alerts, (), state, now))


def dispatcher(
    settings: NotifyConfig, folder: Path | None = None, targets: list[MessageTarget] | None = None
) -> Dispatcher:
    """Start one whose alerts the test gives."""
    made = Dispatcher(Config(notify=settings), folder, targets)
    made._evaluator = Fires()  # type: ignore[assignment]
    made.start()
    return made


@contextlib.contextmanager
def notifier(settings: NotifyConfig, folder: Path | None = None) -> Iterator[Dispatcher]:
    """Run one, and end it."""
    made = dispatcher(settings, folder)
    try:
        yield made
    finally:
        asyncio.run(made.stop())


def see(sink: Dispatcher, *firing: Alert) -> None:
    """Hand over a poll."""
    assert isinstance(sink._evaluator, Fires)
    sink._evaluator.alerts = list(firing)
    sink.update(NOTHING, time.monotonic())


def impatient(settings: NotifyConfig, min_severity: str) -> Policy:
    """Return the policy of a target, with short waits after failures."""
    return replace(FROM_NOTIFY(settings, min_severity), first_retry=0.01, max_retry=0.02)


def names(content: Any, key: str = "firing") -> list[tuple[str, str]]:
    """Return the alerts of a body, with their GPUs."""
    return [(each["alert"], each["labels"]["gpu"]) for each in content[key]]


def test_alerts_of_a_moment_are_one_message() -> None:
    """Alerts that come together go in one message; the end of all is one more."""
    with http_receiver() as server, notifier(to(server)) as sink:
        see(sink, gpu_down(1))
        see(sink, gpu_down(1), gpu_down(2), gpu_hot(3))
        first = server.next().content
        assert names(first) == [("GpuDown", "1"), ("GpuDown", "2"), ("GpuNearThermalSlowdown", "3")]
        see(sink)
        last = server.next().content
        assert (last["firing"], len(last["over"])) == ([], 3)
        until(lambda: sink.notified == {"webhook": DeliveryCounts(2, 0, 0)}, "both are counted")


def test_target_that_hangs_delays_nobody() -> None:
    """While one target says nothing the other is told, the poll does not wait, and the daemon ends in time."""
    with http_receiver() as server, silent_receiver() as port:
        hangs = Secret(text=f"http://127.0.0.1:{port}/")
        settings = replace(to(server), webhook=(hangs, Secret(text=server.url)), timeout=60)
        with notifier(settings) as sink:
            for index in range(3):
                see(sink, *(gpu_down(i) for i in range(index + 1)))
                assert names(server.next().content) == [("GpuDown", str(index))]
            until(
                lambda: sink.notified == {"webhook": DeliveryCounts(0, 0, 0), "webhook-2": DeliveryCounts(3, 0, 0)},
                "they are counted",
            )


def test_target_that_takes_for_ever_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A message that is under way for too long is counted and logged, once."""
    monkeypatch.setattr(sender, "STUCK_SECONDS", 0.1)
    with http_receiver() as server, notifier(to(server)) as sink:
        server.free.clear()

        def counted() -> bool:
            see(sink, gpu_down())
            return sink.notified["webhook"].failed > 0

        until(counted, "it is counted")
        see(sink, gpu_down())
        server.free.set()
        assert names(server.next().content) == [("GpuDown", "3")]
        until(lambda: sink.notified["webhook"] == DeliveryCounts(1, 1, 0), "it got through after all")
    assert len([record for record in caplog.records if "no result after" in record.getMessage()]) == 1


def test_tries_again_with_all_that_came_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A target that fails is told later, in one message, and the log has one line of it, and one of its end."""
    monkeypatch.setattr(Policy, "from_notify", impatient)
    caplog.set_level(logging.INFO)
    with http_receiver() as server, notifier(to(server)) as sink:
        server.status = 500
        see(sink, gpu_down(1))
        until(lambda: sink.notified["webhook"].failed >= 3, "it has failed three times")
        see(sink, gpu_down(1), gpu_down(2))
        before = sink.notified["webhook"].failed
        until(lambda: sink.notified["webhook"].failed >= before + 2, "what was under way has failed, and one with both")
        server.status = 200
        assert names(server.next().content) == [("GpuDown", "1"), ("GpuDown", "2")]
        until(lambda: sink.notified["webhook"].sent == 1, "it is counted")
    faults = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert faults == ['notification not sent target="webhook at 127.0.0.1" reason="HTTP status 500: ok"']
    assert any("delivery works again" in record.getMessage() for record in caplog.records)


def test_refused_message_waits_long() -> None:
    """A target that takes a message for wrong is not asked again at once."""
    with http_receiver() as server, notifier(to(server)) as sink:
        server.status = 404
        see(sink, gpu_down())
        until(lambda: sink.notified["webhook"].failed == 1, "it has failed")
        (each,) = sink._senders
        until(lambda: each._wait_until > time.monotonic() + 200, "it waits")
        assert server.asked == 1


def test_storm_makes_few_messages() -> None:
    """A storm of new alerts makes as many messages as are allowed, and the rest wait for the next one, all of them."""
    settings = replace(FAST, group_wait=0.0, max_per_hour=8)  # two in a row, and one each 450 s
    with http_receiver() as server, notifier(to(server, settings=settings)) as sink:
        alerts = []
        for index in range(200):
            alerts.append(replace(gpu_hot(index), description=f"GPU {index}"))
            see(sink, *alerts)
            if index < 2:
                until(lambda count=index + 1: sink.notified["webhook"].sent == count, "it is told")  # type: ignore[misc]
        (each,) = sink._senders
        with each._turn:
            assert each._next_message() > time.monotonic() + 300
            assert len(each._queue.next_notifications(time.monotonic(), time.time())) == 198
        assert server.asked == 2
        see(sink, *alerts, xid(1))  # critical: it has an allowance of its own, and takes the others along
        contents = [server.next().content for _ in range(3)]
        assert (len(contents[2]["firing"]), names(contents[2])[0]) == (199, ("GpuXidCritical", "1"))


def test_last_words() -> None:
    """What nobody was told yet is told when the daemon ends."""
    with http_receiver() as server:
        with notifier(replace(to(server), group_wait=600)) as sink:
            see(sink, gpu_down())
        assert names(server.next().content) == [("GpuDown", "3")]


def test_restart_does_not_tell_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that starts anew tells what is new, and the end of what an earlier one told."""
    monkeypatch.setattr(queue_module, "RESTORED_SECONDS", 0.0)
    monkeypatch.setattr(evaluator, "RESTORED_SECONDS", 0.0)
    with http_receiver() as server:
        with notifier(to(server), tmp_path / "told") as sink:
            see(sink, gpu_down(1), near_oom())
            server.next()
            until((tmp_path / "told/webhook.json").exists, "it is kept")
        with notifier(replace(to(server), resolve_after=1.0), tmp_path / "told") as sink:
            see(sink)
            see(sink, gpu_down(1), gpu_down(2))
            assert names(server.next().content) == [("GpuDown", "2")]
            assert names(server.next().content, "over") == [("RunNearOutOfMemory", "3")]


def test_new_address_is_told_all(tmp_path: Path) -> None:
    """After an address was corrected the right one is told what the wrong one was; what is kept shows neither."""
    address = tmp_path / "address"

    def start() -> contextlib.AbstractContextManager[Dispatcher]:
        return notifier(replace(FAST, webhook=(Secret(file=address),)), tmp_path / "told")

    with http_receiver() as wrong, http_receiver() as right:
        address.write_text(f"{wrong.url}/{SECRET}")
        with start() as sink:
            see(sink, gpu_down(1))
            wrong.next()
            until((tmp_path / "told/webhook.json").exists, "it is kept")
        address.write_text(f"{right.url}/{SECRET}")
        with start() as sink:
            see(sink, gpu_down(1))
            assert "GPU 1 " in right.next().content["text"]
            until(lambda: sink.notified["webhook"].sent == 1, "it is counted")
        address.unlink()
        with start() as sink:  # which cannot say whom it reaches, and tells none twice for that
            see(sink, gpu_down(1))
            (each,) = sink._senders
            until(lambda: list(each._queue.sent(0.0)), "what was told before is known")
            address.write_text(f"{right.url}/{SECRET}")
            see(sink, gpu_down(1), gpu_down(2))
            assert "GPU 1 " not in right.next().content["text"]
        kept = (tmp_path / "told/webhook.json").read_text()
        assert SECRET not in kept
        assert str(right.port) not in kept


def test_whom_a_target_reaches(tmp_path: Path) -> None:
    """Each kind has a digest that differs by address."""
    one, other = Secret(text=f"https://a/{SECRET}"), Secret(text=f"https://b/{SECRET}")
    for pair in (
        [NotifyConfig(webhook=(each,)) for each in (one, other)],
        [NotifyConfig(apprise=(each,)) for each in (one, other)],
    ):
        was, became = (next(iter(message_targets(each))).address_digest() for each in pair)
        assert was
        assert became
        assert was != became
        assert SECRET not in was
    (absent,) = message_targets(replace(FAST, webhook=(Secret(file=tmp_path / "absent"),)))
    assert absent.address_digest() is None


def test_memory_is_of_one_address(tmp_path: Path) -> None:
    """What another address was told is not taken; one that changes meanwhile does so from the next start on."""

    def read(whom: str | None) -> list[tuple[Alert, float]]:
        return SentAlerts(tmp_path, "mail", lambda: whom).read(wall=1000.0)

    told = [(gpu_down(), 0.0)]
    SentAlerts(tmp_path, "mail").write(told, wall=1000.0)  # as older daemons did
    whom = ["aaaa"]
    first = SentAlerts(tmp_path, "mail", lambda: whom[0])
    assert first.read(wall=1000.0) == told
    whom[0] = "bbbb"
    first.write(told, wall=1000.0)
    assert [read(each) for each in ("aaaa", None, "bbbb")] == [told, told, []]


def test_memory_of_a_target(tmp_path: Path) -> None:
    """What was told is read as it was written, with how long ago that was; a clock that went back makes it now."""
    died = Alert(CONDITIONS["RunDied"], {"outcome": "killed"}, "Run “a”\nended.", 5.0, "alice", last=6.0)
    SentAlerts(tmp_path, "mail").write([(died, 60.0), (gpu_down(), 0.0)], wall=1000.0)
    expected = replace(died, description="Run “a” ended.")
    assert SentAlerts(tmp_path, "mail").read(wall=1030.0) == [(expected, 90.0), (gpu_down(), 30.0)]
    assert SentAlerts(tmp_path, "mail").read(wall=950.0) == [(expected, 10.0), (gpu_down(), 0.0)]
    assert SentAlerts(None, "mail").read(wall=950.0) == []


def test_spoilt_memory_is_left_alone(tmp_path: Path) -> None:
    """A file that is not ours to read costs no alert."""
    SentAlerts(tmp_path, "webhook").write([(gpu_down(), 0.0)], wall=1000.0)
    written = (tmp_path / "webhook.json").read_text()
    assert '"told": 1000.0' in written
    times = [written.replace('"told": 1000.0', f'"told": {each}') for each in ("NaN", "1e300", "9" * 400)]
    for content in ("", "[]", '{"version": 2}', '{"version": 1, "alerts": [{}]}', "\0" * 100, *times):
        (tmp_path / "webhook.json").write_text(content)
        assert SentAlerts(tmp_path, "webhook").read(1000.0) == []


def test_no_memory_costs_no_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing can be kept, alerts are told, and the log says so once."""
    (tmp_path / "file").write_text("")
    with http_receiver() as server, notifier(to(server), tmp_path / "file" / "told") as sink:
        for index in (1, 2):
            see(sink, *(gpu_down(i) for i in range(index)))
            server.next()
        until(lambda: sink.notified["webhook"].sent == 2, "both are told")
    assert len([record for record in caplog.records if "cannot save notifications" in record.getMessage()]) == 1


def test_fault_of_a_target_is_its_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An error in one target's code is logged once and tried again, as any other failure."""
    monkeypatch.setattr(Policy, "from_notify", impatient)
    told: list[Message] = []

    class Faulty(MessageTarget):
        def _deliver(self, message: Message) -> None:
            told.append(message)
            if len(told) == 1:
                raise ZeroDivisionError(SECRET)
            if len(told) == 2:
                raise DeliveryError("not yet")

    faulty = Faulty("faulty", "a faulty one", Secret(text=SECRET), FAST, "info")
    sink = dispatcher(FAST, None, [faulty])
    see(sink, gpu_down())
    until(lambda: sink.notified["faulty"].sent == 1, "the third attempt gets through")
    asyncio.run(sink.stop())
    assert sink.notified["faulty"].failed == 2
    said, _not_yet = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.startswith(
        'notification not sent target="a faulty one" reason="bug in gpuwarden, please report it: ZeroDivisionError in '
    )
    assert re.search(r" > tests\.alerts\.delivery\.test_sender\._deliver:\d+\"$", said)
    assert SECRET not in caplog.text
