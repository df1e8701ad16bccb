"""Flight recorder: keeps the last ten minutes, and freezes an incident when something goes wrong.

Events of the history open incidents. A later event that shares a GPU, a run or a job joins the
incident instead (JOIN_SECONDS). An incident is stored at once, and again ten seconds after its last event.
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

from gpuwarden.fairness.fair_eviction import select_evicted
from gpuwarden.fairness.log_limiter import limit_lines_of
from gpuwarden.fairness.rate_limit import RateLimits
from gpuwarden.formatting import format_fields
from gpuwarden.gpu.snapshot import GpuProcess, MemorySample
from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.history.event_log import Event, EventLog, end_event
from gpuwarden.history.series import HistoryFrame, HistorySeries
from gpuwarden.host import procfs
from gpuwarden.incidents.causes import Fact
from gpuwarden.incidents.facts import HARDWARE, find_run, gather, incident_kind, ties_of, window_start
from gpuwarden.incidents.incident import INCIDENT_KINDS, KernelLine
from gpuwarden.incidents.incident_builder import Recording, build_incident
from gpuwarden.incidents.incident_store import IncidentStore
from gpuwarden.incidents.incident_table import IncidentShare, find_share
from gpuwarden.incidents.steady_clock import SteadyClock
from gpuwarden.owners.resolver import Owners
from gpuwarden.protocol.validators import clip
from gpuwarden.records.record import RunRecord
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import State

Dated = TypeVar("Dated", Event, KernelLine)
log = logging.getLogger(__name__)

AFTER_SECONDS = 10.0  # recorded after the last event of an incident
JOIN_SECONDS = 120.0  # after the last event, in which a further one joins: a stall is noticed after a minute
MAX_JOIN_SECONDS = 300.0  # after the first event; a later one opens an incident of its own
QUIET_SECONDS = 120.0  # without the same trouble, after which it opens an incident again
OLD_SECONDS = 30.0  # an event that is older when it is first seen, as after the daemon's start, opens none
MAX_OPEN = 8  # incidents that can be joined; fair by share
MAX_EVENTS = 64  # of an incident; further ones open another
BURST = 4  # incidents of one share and kind in a row
SECONDS_PER_INCIDENT = 600.0  # and one in this time in the long run
MAX_RUNS = 32  # of an incident
MAX_KERNEL_LINES = 200
MAX_LINE = 300  # characters
MAX_NOTE = 200  # characters


@dataclass(slots=True)
class _OpenIncident:
    """Incident that is being recorded, or can be joined; `opened` to `due` are monotonic, `due` when it is complete."""

    id: str
    uid: int | None
    share: IncidentShare
    at: float  # Unix time
    opened: float
    last: float
    due: float | None
    state: State
    processes: Mapping[str, tuple[GpuProcess, ...]]  # of the last frame with any before the event, by UUID
    owners: Owners  # of them
    frames: list[HistoryFrame] = field(default_factory=list)
    samples: dict[str, list[MemorySample]] = field(default_factory=dict)
    ties: set[str] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)
    note: str = ""
    has_news: bool = True  # events that are not stored: it is frozen once a poll, however many there are


class FlightRecorder:
    """Ring of the last ten minutes, and the incidents frozen from it. Used by one event loop; `now` is monotonic.

    `outlines` returns the records of runs by id. `enabled` is false if only the history is wanted.
    """

    def __init__(
        self, store: IncidentStore, outlines: Callable[[Iterable[str]], list[RunRecord]], *, enabled: bool = True
    ) -> None:
        self.series = HistorySeries()
        self.events = EventLog()
        self.store = store
        self.counts: dict[str, int] = dict.fromkeys(INCIDENT_KINDS, 0)  # by what opened the incident
        self.dropped = 0  # by the rate limit, or too many at once
        self._outlines = outlines
        self._enabled = enabled
        self._open: list[_OpenIncident] = []
        self._lines: deque[KernelLine] = deque(maxlen=MAX_KERNEL_LINES)
        self._clock = SteadyClock()
        self._seen: dict[tuple[str, ...], float] = {}  # when the same trouble was last seen (monotonic)
        self._limits = RateLimits(BURST, SECONDS_PER_INCIDENT)
        self._state: State | None = None
        self._host = os.uname().nodename
        self._boot_id = procfs.read_boot_id() or ""

    def add_poll(self, state: State, now: float) -> None:
        """Add a poll; open, join or complete incidents. Does not block."""
        is_first, self._state = self._state is None, state
        self._clock.add_reading(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))
        self.series.add_poll(state, now)
        new = [*self.events.add_poll(state), *_failures(state)]
        for record in state.kernel_records:
            text = clip(record.message.decode(errors="replace"), MAX_LINE)
            self._lines.append(KernelLine(timestamp_seconds=record.time, text=text))
        if not self._enabled:
            return
        for event in new:
            self._handle(event, state, now, is_first=is_first)
        for incident in self._open:
            is_complete = incident.due is not None and now >= incident.due
            if is_complete or incident.has_news:
                self._freeze(incident, is_complete=is_complete)
        self._open = [each for each in self._open if now < self._joinable_until(each) or each.due is not None]
        self.store.flush(now)

    def _handle(self, event: Event, state: State, now: float, *, is_first: bool) -> None:
        kind = incident_kind(event, state)
        age = self._clock.corrected(state.snapshot.time) - self._clock.corrected(event.timestamp_seconds)
        if kind is None or not -1.0 <= age < OLD_SECONDS:
            return
        if is_first and event.kind in CONDITIONS and CONDITIONS[event.kind].event_seconds is None:
            return  # it held before this daemon started
        ties = ties_of(event, kind, state)
        joined = next((each for each in self._open if ties & each.ties and self._can_join(each, now)), None)
        key = (kind, event.run_id or event.uuid or "", str(event.xid or ""))
        is_repeated = now - self._seen.get(key, -QUIET_SECONDS) < QUIET_SECONDS
        self._remember(key, now)
        if joined is not None:
            if is_repeated and len(joined.events) > 1:
                return
            self._join(joined, event, ties, now)
        elif not is_repeated:
            run = find_run(state, event.run_id)
            self._begin(event, kind, ties, run.peer.uid if run else None, now)

    def _can_join(self, incident: _OpenIncident, now: float) -> bool:
        return now < self._joinable_until(incident) and len(incident.events) < MAX_EVENTS

    @staticmethod
    def _joinable_until(incident: _OpenIncident) -> float:
        return min(incident.last + JOIN_SECONDS, incident.opened + MAX_JOIN_SECONDS)

    def _remember(self, key: tuple[str, ...], now: float) -> None:
        if len(self._seen) > 1000:  # noqa: PLR2004 - of many users and runs
            self._seen = {each: at for each, at in self._seen.items() if now - at < QUIET_SECONDS}
        self._seen[key] = now

    def _begin(self, event: Event, kind: str, ties: frozenset[str], uid: int | None, now: float) -> None:
        gpu = self._state.snapshot.gpu_with(event.uuid) if self._state and event.uuid else None
        share = find_share(uid, kind, gpu.identity.index if gpu else None)
        self._limits.expire(now)
        if not self._limits.allows((share, kind), now):
            self.dropped += 1
            return
        self._limits.consume((share, kind), now)
        self._make_room()
        incident = self._new(event.timestamp_seconds, uid, share, now, event.text)
        incident.ties |= ties
        incident.events.append(event)
        self._open.append(incident)
        self.counts[kind] += 1
        with limit_lines_of(uid) if uid is not None else nullcontext():
            log.info("incident opened %s", format_fields(id=incident.id, kind=kind))

    def _make_room(self) -> None:
        """Complete an incident early if as many are open as there can be."""
        shares = ((place, each.share) for place, each in enumerate(self._open))
        for place in select_evicted(shares, MAX_OPEN - 1):
            incident = self._open.pop(place)
            if incident.due is not None:
                self._freeze(incident, is_complete=True)

    def _join(self, incident: _OpenIncident, event: Event, ties: frozenset[str], now: float) -> None:
        if HARDWARE in ties:
            incident.uid, incident.share = None, IncidentShare()  # else later incidents of that user would displace it
        incident.ties |= ties
        incident.events.append(event)
        incident.last, incident.due, incident.has_news = now, now + AFTER_SECONDS, True

    def _new(self, at: float, uid: int | None, share: IncidentShare, now: float, text: str) -> _OpenIncident:
        assert self._state is not None
        frames = self.series.frames()
        listed = [frame for frame in frames if frame.processes]
        corrected = self._clock.corrected
        before = [frame for frame in listed if corrected(frame.time) < corrected(at)] or listed
        suffix = zlib.crc32(f"{at} {text}".encode()) & 0xFFFFFF
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(at))}-{suffix:06x}"
        return _OpenIncident(
            name,
            uid,
            share,
            at,
            opened=now,
            last=now,
            due=now + AFTER_SECONDS,
            state=self._state,
            processes=before[-1].processes if before else {},
            owners=(before[-1].owners if before else None) or Owners(),
        )

    def record(self, note: str = "") -> str:
        """Record an incident on request; return its id. Raises ValueError before the first poll."""
        if self._state is None or not self._enabled:
            raise ValueError("incidents are switched off" if self._state else "no poll yet")
        now = time.monotonic()
        incident = self._new(time.time(), None, IncidentShare(), now, note)
        incident.note = clip(note, MAX_NOTE)
        self._open.append(incident)
        self.counts["requested"] += 1
        self._freeze(incident, is_complete=False)
        return incident.id

    async def stop(self, seconds: float) -> None:
        """Store the incidents that are being recorded, and wait."""
        for incident in self._open:
            if incident.due is not None:
                self._freeze(incident, is_complete=True)
        await self.store.wait(seconds)

    def _freeze(self, incident: _OpenIncident, *, is_complete: bool) -> None:
        """Store an incident as known now."""
        assert self._state is not None
        incident.has_news = False
        if is_complete:
            incident.due = None
        self._add_frames(incident)
        state, events, lines = self._state, self.events.newest_first(), list(self._lines)
        if self._clock.has_stepped:
            state, incident = self._correct_state(state), self._correct_incident(incident)
            events, lines = self._correct_each(events), self._correct_each(lines)
        opened, events = sorted(incident.events, key=_time_of), sorted(events, key=_time_of)
        since = (window_start(opened) if opened else incident.at) - 1.0
        facts = gather(events, state, incident.ties, opened, since=since)
        if not opened or not facts:
            facts = [*facts, Fact(at=incident.at, kind="requested", opened=True)]
        runs = self._concerned_runs(state, facts, incident)
        recording = Recording(
            id=incident.id,
            at=incident.at,
            host=self._host,
            boot_id=self._boot_id,
            opened=opened,
            facts=facts,
            note=incident.note,
            uid=incident.uid,
            state=incident.state,
            ended=state.snapshot.time if is_complete else None,
            frames=tuple(incident.frames),
            processes=incident.processes,
            owners=incident.owners,
            samples={uuid: tuple(each) for uuid, each in incident.samples.items()},  # the lists still grow
            runs=self._outlines(runs),
            jobs=sorted({run.hello.job for run in state.runs if run.hello.job and run.peer.run_id in incident.ties}),
            events=[event for event in events if event.timestamp_seconds >= since],
            kernel_lines=[line for line in lines if line.timestamp_seconds >= since],
        )
        self.store.put(incident.id, lambda: build_incident(recording))

    def _correct_each(self, dated: Iterable[Dated]) -> list[Dated]:
        """Return values with their times by the clock as it is set now."""
        return [replace(each, timestamp_seconds=self._clock.corrected(each.timestamp_seconds)) for each in dated]

    def _correct_state(self, state: State) -> State:
        """Return a state whose runs have their times by the clock as it is set now."""

        def correct(run: RunSnapshot) -> RunSnapshot:
            errors = tuple(replace(seen, at=self._clock.corrected(seen.at)) for seen in run.errors)
            ending = replace(run.ending, at=self._clock.corrected(run.ending.at)) if run.ending else None
            return replace(run, errors=errors, ending=ending)

        return replace(state, runs=tuple(map(correct, state.runs)))

    def _correct_incident(self, incident: _OpenIncident) -> _OpenIncident:
        """Return a copy of an incident with its times by the clock as it is set now."""
        corrected = self._clock.corrected
        return replace(
            incident,
            at=corrected(incident.at),
            events=self._correct_each(incident.events),
            frames=[replace(frame, time=corrected(frame.time)) for frame in incident.frames],
            samples={uuid: [(corrected(at), used) for at, used in each] for uuid, each in incident.samples.items()},
        )

    def _add_frames(self, incident: _OpenIncident) -> None:
        """Add the frames and memory samples since the last time: the ring drops those of before the incident."""
        last = incident.frames[-1].taken if incident.frames else float("-inf")
        new = [frame for frame in self.series.frames() if frame.taken > last]
        incident.frames += new
        for frame in new:
            for uuid, samples in frame.samples.items():
                known = incident.samples.setdefault(uuid, [])
                known += [(frame.time - (frame.taken - at), used) for at, used in samples if at <= frame.taken]

    def _concerned_runs(self, state: State, facts: Sequence[Fact], incident: _OpenIncident) -> list[str]:
        """Return the ids of the runs of an incident, then of those on its GPUs, then of others."""
        concerned = dict.fromkeys(fact.run_id for fact in sorted(facts, key=lambda fact: fact.at) if fact.run_id)
        on_gpus = [run.peer.run_id for run in state.runs if incident.ties & run.devices.keys()]
        others = [run.peer.run_id for run in state.runs if run.up]
        return list(dict.fromkeys((*concerned, *on_gpus, *others)))[:MAX_RUNS]


def _failures(state: State) -> list[Event]:
    """Return the ends of runs that have failed since the last poll, before their outcome is settled.

    The event log has a run's end once it is settled; the host may crash before.
    """
    ends = ((run, run.ending) for run in state.detection.ended)
    return [end_event(run, end) for run, end in ends if end and end.has_failed and not end.settled]


def _time_of(event: Event) -> float:
    return event.timestamp_seconds
