"""Runs that send well-formed nonsense: it must break neither a poll nor the data of other runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import pytest

from gpuwarden.advice.advisor import Advisor
from gpuwarden.analysis.oom.co_tenants import CoTenantTracker
from gpuwarden.cli.runs.memory_chart import ASCII
from gpuwarden.cli.runs.memory_report import TerminalFormat, render_memory_timeline
from gpuwarden.config.schema import Config
from gpuwarden.daemon.metrics_page import read_tables
from gpuwarden.formatting import sanitize
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.health.detector import Detector
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.metrics.exposition import Exposition
from gpuwarden.owners.resolver import Owners
from gpuwarden.pressure.levels import PressureWatch
from gpuwarden.protocol.codec import ProtocolError, decode, decode_reply, encode
from gpuwarden.protocol.messages import (
    ERROR_KINDS,
    PHASES,
    STAGES,
    STEP_BUCKETS,
    Allocation,
    DeviceMemory,
    End,
    Error,
    Hello,
    Message,
    Reply,
    Report,
)
from gpuwarden.protocol.validators import MAX_COUNT
from gpuwarden.records.record import record_from_json
from gpuwarden.records.recorder import Recorder
from gpuwarden.runs.outcome import OutcomeTracker
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.run_snapshot import JoinedPoll
from gpuwarden.runs.run_state import RunState
from gpuwarden.state import State
from gpuwarden.usage.accountant import UsageAccountant
from snapshots import GIB, gpu, mig_gpu, snapshot

T = TypeVar("T")
DEVICES = ("GPU:0", "GPU:1", "GPU:2", "GPU:3", "CPU:0", "GPU:99999", "GPU:²")
TEXTS = ("", "²", "١٢", "²,3", "0,0", "-1", "64,32,32,3", "9" * 110, "GPU:0", "{}%s", "[Op:Mul]", "{{node x}}")


class Liar:
    """Generator of messages that are valid in the protocol and that no real run would send."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def hello(self) -> Hello:
        """Make a hello with several devices that are one GPU."""
        uuids = [None, "GPU-0", "GPU-0", "GPU-1", "MIG-1-0", "junk"]
        return Hello(
            self._text(),
            self._random.choice(["tensorflow 2", "torch 2", "jax", ""]),
            {each: self._random.choice(uuids) for each in self._some(DEVICES)},
            hears=self._random.random() < 0.7,
        )

    def message(self) -> Message:
        """Make any message; most are reports."""
        makers: list[Callable[[], Message]] = [*[self.report] * 6, self.error, self.error, self.hello]
        return self._random.choice([*makers, self.end])()

    def end(self) -> Message:
        """Make an end, which may not be the last message."""
        return End(self._text())

    def report(self) -> Report:
        """Make a report of any numbers."""
        return Report(
            phase=self._random.choice(PHASES),
            steps=self._count(),
            step_seconds=float(self._count()) / 4,
            step_buckets=tuple(self._count() for _ in range(len(STEP_BUCKETS) + 1)),
            memory=self._memory(),
            epoch=self._maybe(self._count),
            examples=self._maybe(self._count),
            batch_size=self._maybe(self._count),
            largest_batch_size=self._maybe(self._count),
            oom_retries=self._count(),
        )

    def error(self) -> Error:
        """Make an error of any kind, an out-of-memory more often than not."""
        texts, several = [self._text] * 4, self._random.randrange(4)
        return Error(
            kind=self._random.choice([*ERROR_KINDS, "device_oom", "device_oom", "host_oom"]),
            exception=self._text(),
            text=self._text(),
            phase=self._random.choice(PHASES),
            steps=self._count(),
            allocations=tuple(
                Allocation(self._maybe(self._count), *(self._maybe(each) for each in texts)) for _ in range(several)
            ),
            memory=self._memory(),
            batch_size=self._maybe(self._count),
            stage=self._maybe(lambda: self._random.choice(STAGES)),
            weights=self._maybe(self._count),
            trainable=self._maybe(self._count),
            like_weight=self._random.choice([None, True, False]),
        )

    def box(self) -> Snapshot:
        """Make the GPUs of a poll: one may be gone, divided, lost or full."""
        free = self._random.choice([0, GIB, 80 * GIB])
        held = {pid: self._random.choice([None, 0, GIB, 50 * GIB]) for pid in range(1, self._random.randrange(2, 6))}
        whole = gpu(0, free=free, held=held)
        other = self._random.choice(
            [gpu(1), mig_gpu(1, free=(GIB, 2 * GIB), held={1: 0}), replace(gpu(1), fault="lost")]
        )
        return snapshot(*self._random.choice([(), (whole,), (whole, other), (other, whole)]))

    def _count(self) -> int:
        return self._random.choice([0, 0, 1, 2, self._random.randrange(1 << 40), MAX_COUNT - 1])

    def _text(self) -> str:
        return self._random.choice(TEXTS)

    def _maybe(self, make: Callable[[], T]) -> T | None:
        return None if self._random.random() < 0.3 else make()

    def _memory(self) -> dict[str, DeviceMemory]:
        optional = self._maybe(self._count), self._maybe(self._count)
        return {each: DeviceMemory(self._count(), self._count(), *optional) for each in self._some(DEVICES)}

    def _some(self, of: tuple[str, ...]) -> list[str]:
        return self._random.sample(of, self._random.randrange(len(of)))


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8))])
def test_nonsense_costs_nobody_else(seed: int) -> None:
    """Every poll gives a page, records that their readers accept, and charts that a terminal shows."""
    liar, config, sent = Liar(Random(seed)), Config(), list[Reply]()  # noqa: S311 - no secret

    registry, accounts = RunRegistry(limit=10, expiry=60.0, overhead=GIB), UsageAccountant(10.0)
    records = Recorder(None, 10, max_runs=9)
    pressure, exposition = PressureWatch(config.pressure), Exposition()
    advisor, tracker, detector = Advisor(config.pressure), CoTenantTracker(), Detector()
    peers = [ProcessKey(pid, 1000, pid, 1e9) for pid in range(1, 4)]
    for peer in peers:
        registry.receive(peer, liar.hello(), 1000.0)
    for poll in range(40):
        now = 1000.0 + poll * (0.5 if seed % 2 else 7.0)
        for peer in peers * 2:
            registry.receive(peer, _round_trip(liar.message()), now)
        box = liar.box()
        co_tenants = tracker.add_poll(box, Owners(), now)
        runs = registry.add_poll(box, now, co_tenants=co_tenants)
        joined = JoinedPoll(box, runs, now, co_tenants=co_tenants)
        usage = accounts.add_poll(joined)
        found = pressure.evaluate(joined)
        state = State("nvml", 1.0, box, runs, records.list_usage(), pressure=found)
        advice = advisor.evaluate(joined, found, detector.evaluate(state, now))
        advisor.confirm(advice.messages, now)
        sent += [decode_reply(encode(each.advice)) for each in advice.messages]
        records.add_poll(joined, usage, advice.events_with(advice.messages))
        assert exposition.render(read_tables(state)).text
        _read(records, peers)
    assert sent


def _round_trip(message: Message) -> Message:
    return decode(encode(message))


def _read(records: Recorder, peers: list[ProcessKey]) -> None:
    """Read all run records as `gpuwarden runs` does."""
    listed: dict[str, Any] = json.loads(asyncio.run(records.listing()))
    for plain in (*listed["live"], *listed["past"]):
        record_from_json(plain)
    for peer in peers:
        plain = asyncio.run(records.one(peer.run_id))
        assert plain is not None
        for _label, text in render_memory_timeline(record_from_json(json.loads(plain)), TerminalFormat(40, ASCII)):
            assert sanitize(text).isprintable()


def test_fault_of_our_own_costs_one_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An internal error of the daemon loses one message or one run's part of a poll, and is logged once."""
    registry = RunRegistry(limit=10, expiry=60.0, overhead=0.0)
    peers = [ProcessKey(pid, 1000, pid) for pid in (1, 2)]
    for peer in peers:
        registry.receive(peer, Hello(f"run {peer.pid}", "tensorflow", {}), 0.0)

    def fails(record: RunState, *_: Any, **__: Any) -> bool:
        if record.peer.pid == 1:
            raise ZeroDivisionError
        return registry_run(record, *_, **__)

    registry_run = RunState.handle
    monkeypatch.setattr(RunState, "handle", fails)
    with pytest.raises(ProtocolError, match="internal"):
        registry.receive(peers[0], End("exit"), 1.0)
    registry.receive(peers[1], End("exit"), 1.0)
    assert registry.received == 3

    monkeypatch.setattr(OutcomeTracker, "add_evidence", lambda outcome, *_: 1 // (outcome._pid - 1) and None)
    for _ in range(2):
        assert [run.peer.pid for run in registry.add_poll(snapshot(gpu(0)), 2.0)] == [2]
    assert registry.rejected["internal"] == 2  # and the message, which the server counts
    assert sum("please report it" in record.message for record in caplog.records) == 2
