"""A training run in `/api/v1/state`: how it stands now; its receipt says what it did so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from gpuwarden.api.form import Form, Json, Key
from gpuwarden.api.gpus import TROUBLE
from gpuwarden.api.troubles import GRAVITIES, Judged, Trouble, gravest
from gpuwarden.protocol import DeviceMemory, Report
from gpuwarden.runs.growth import Growth
from gpuwarden.runs.run import Run
from gpuwarden.runs.stall import Stall
from gpuwarden.runs.verdict import Verdict
from gpuwarden.state import State

MOST_RUNS = 100  # the API has the others, and the page all: an answer is written on the loop


class SeenRun(NamedTuple):
    """A run with what else the poll has to say of it; `steps_per_second` is that of the last minute."""

    run: Run
    state: State
    troubles: Sequence[Trouble]
    user: str | None = None
    steps_per_second: float | None = None


class SeenDevice(NamedTuple):
    """A run on one GPU or MIG instance."""

    run: Run
    state: State
    uuid: str

    @property
    def memory(self) -> DeviceMemory | None:
        """What its allocator says."""
        return self.run.memory.get(self.uuid)

    @property
    def growth(self) -> Growth | None:
        """How that grows, if it does for good."""
        return self.run.growth.get(self.uuid)


def _share(seen: SeenDevice) -> float | None:
    left, memory = seen.run.headroom.get(seen.uuid), seen.memory
    if left is None or memory is None:
        return None
    return left / (left + memory.current) if left + memory.current else 0.0


def _level(seen: SeenDevice) -> str | None:
    pressure = seen.state.pressure.of_runs.get((seen.run.peer.run_id, seen.uuid))
    return pressure.level if pressure else None


def _devices(seen: SeenRun) -> list[Json]:
    run = seen.run
    uuids = dict.fromkeys((*run.devices, *run.memory, *run.headroom_unknown))
    return [DEVICE.write(SeenDevice(run, seen.state, uuid)) for uuid in uuids if uuid]


def _input_wait(report: Report) -> float | None:
    waited, observed = report.input_wait_seconds, report.input_observed_seconds
    return min(waited / observed, 1.0) if waited is not None and observed else None


def _of_memory(read: Callable[[DeviceMemory], Any]) -> Callable[[SeenDevice], Any]:
    return lambda seen: read(memory) if (memory := seen.memory) else None


def _of_growth(read: Callable[[Growth], Any]) -> Callable[[SeenDevice], Any]:
    return lambda seen: read(growth) if (growth := seen.growth) else None


def _of_report(read: Callable[[Report], Any]) -> Callable[[SeenRun], Any]:
    return lambda seen: read(seen.run.report) if seen.run.report else None


def _now(read: Callable[[Report], Any]) -> Callable[[SeenRun], Any]:
    """Read something that is so now, by the last report; nothing once that is old or the run has ended."""
    return lambda seen: read(seen.run.report) if seen.run.report and seen.run.current else None


# fmt: off
STALL = Form[Stall](
    "`stall`",
    "A step that takes much longer than the run's steps usually do (runs.md).",
    (
        Key("seconds", "Time without a step.", lambda each: each.seconds, always=True),
        Key("cause", "What the run seems to do instead.", lambda each: each.cause, always=True),
    ),
)
VERDICT = Form[Verdict](
    "`verdict`",
    "Why the run's last out-of-memory came (verdicts.md).",
    (
        Key("name", "One of the verdicts.", lambda each: each.name, always=True),
        Key("evidence", "What it rests on, with numbers.", lambda each: each.evidence, always=True),
        Key("next_step", "What to do.", lambda each: each.next_step, always=True),
    ),
)
DEVICE = Form[SeenDevice](
    "Each of `devices`",
    "The run on one GPU or MIG instance. What follows from its last report is there while that holds.",
    (
        Key("uuid", "UUID of the GPU or MIG instance.", lambda seen: seen.uuid, always=True),
        Key("memory_in_use_bytes", "What its allocator has handed out.", _of_memory(lambda each: each.current)),
        Key("memory_peak_bytes", "Most that it ever had handed out.", _of_memory(lambda each: each.peak)),
        Key("memory_limit_bytes", "Its allocator's own limit.", _of_memory(lambda each: each.limit)),
        Key("memory_reserved_bytes", "What its allocator holds of the device, where it says so.", _of_memory(lambda each: each.reserved)),
        Key("headroom_bytes", "What it can still allocate (headroom.md).", lambda seen: seen.run.headroom.get(seen.uuid)),
        Key("headroom_ratio", "Of what it uses and can still allocate, the part that it can still allocate.", _share),
        Key("headroom_at_peak_bytes", "What it could still allocate if it used as much as at its peak.", lambda seen: seen.run.headroom_at_peak.get(seen.uuid)),
        Key("headroom_unknown", "Why no headroom can be told.", lambda seen: seen.run.headroom_unknown.get(seen.uuid)),
        Key("pressure", "How close it is to the end of that memory: none, some or critical.", _level),
        Key("memory_growth_bytes_per_second", "How fast what is in use grows for good, while it does so (foresight.md).", _of_growth(lambda each: each.bytes_per_second)),
        Key("memory_grown_bytes", "What it has grown by so far.", _of_growth(lambda each: each.grown)),
        Key("seconds_to_oom", "How long it is to the limit at that rate.", _of_growth(lambda each: each.left and each.left.seconds)),
        Key("seconds_to_oom_lower", "At least so long.", _of_growth(lambda each: each.left and each.left.lower)),
        Key("seconds_to_oom_upper", "At most so long; not there where it may never come.", _of_growth(lambda each: each.left and each.left.upper)),
    ),
)
RUN = Form[SeenRun](
    "Each of `runs`",
    "A training run that goes on, or has ended lately (`runs.expiry`).",
    (
        Key("run_id", "The run on this box since it was booted; the label of the metrics.", lambda seen: seen.run.peer.run_id, always=True),
        Key("name", "What the run calls itself.", lambda seen: seen.run.hello.name, always=True),
        Key("framework", "What it trains with.", lambda seen: seen.run.hello.framework, always=True),
        Key("up", "Whether its process lives and has not said its end.", lambda seen: seen.run.up, always=True),
        Key("current", "Whether its last report still tells of now.", lambda seen: seen.run.current, always=True),
        Key("condition", "ok, warning or critical: the worst of its troubles.", lambda seen: gravest(seen.troubles), always=True),
        Key("troubles", "What is wrong with it, the worst first.", lambda seen: list(map(TROUBLE.write, seen.troubles)), part=TROUBLE),
        Key("receipt", "Path of its receipt: all else that is known of it (receipts.md).", lambda seen: f"/api/v1/runs/{quote(seen.run.peer.run_id, safe='')}", always=True),
        Key("pid", "Its process; 0 for one that this daemon cannot see.", lambda seen: seen.run.peer.pid, always=True),
        Key("uid", "Whose process that is.", lambda seen: seen.run.peer.uid, always=True),
        Key("user", "The user's name.", lambda seen: seen.user),
        Key("job", "Job of several processes that it is part of.", lambda seen: seen.run.hello.job),
        Key("rank", "Its place in the job, from 0.", lambda seen: seen.run.hello.rank),
        Key("began_timestamp_seconds", "When it first reported to this daemon, in Unix time.", lambda seen: seen.run.began, always=True),
        Key("last_report_timestamp_seconds", "When it last reported, in Unix time.", lambda seen: seen.run.last_report),
        Key("ended_timestamp_seconds", "When it ended, in Unix time.", lambda seen: e.at if (e := seen.run.ending) else None),
        Key("outcome", "How it ended (runs.md); may change for some seconds.", lambda seen: e.outcome if (e := seen.run.ending) else None),
        Key("evidence", "What that was concluded from.", lambda seen: e.evidence if (e := seen.run.ending) else None),
        Key("phase", "What it does now: train, test, predict or idle.", _now(lambda report: report.phase)),
        Key("epoch", "The epoch it is in, from 0.", _now(lambda report: report.epoch)),
        Key("batch", "The batch of the epoch it is at, from 0.", _now(lambda report: report.batch)),
        Key("batch_size", "Examples of its last step.", _now(lambda report: report.batch_size)),
        Key("steps", "Training steps so far.", _of_report(lambda report: report.steps)),
        Key("steps_per_second", "Steps a second over the last minute, or since it began; not there for its first seconds.", lambda seen: seen.steps_per_second),
        Key("step_median_seconds", "What half of its steps did not exceed.", _of_report(lambda report: report.step_median)),
        Key("step_p95_seconds", "What 95 % of its steps did not exceed.", _of_report(lambda report: report.step_p95)),
        Key("input_wait_ratio", "Of the time of its steps, the part in which they waited for input, where that is known (slow.md).", _of_report(_input_wait)),
        Key("loss", "The last loss, where the user lets it be told.", _now(lambda report: report.loss)),
        Key("errors", "Errors that steps raised, by kind (errors.md).", _of_report(lambda report: dict(report.errors))),
        Key("stall", "There while a step hangs.", lambda seen: STALL.write(s) if (s := seen.run.stall) else None, part=STALL),
        Key("verdict", "There once it was out of memory.", lambda seen: VERDICT.write(v) if (v := seen.run.verdict) else None, part=VERDICT),
        Key("batch_size_advice", "Which batch size would fit, in a sentence (batch-size.md).", lambda seen: a.text if (a := seen.run.batch_size_advice) else None),
        Key("host_memory_bytes", "Host memory resident in its processes.", lambda seen: p.memory if (u := seen.run.usage) and (p := u.present) and seen.run.up else None),
        Key("host_memory_growth_bytes_per_second", "How fast that grows for good, while it does so.", lambda seen: g.bytes_per_second if (g := seen.run.host_growth) else None),
        Key("host_memory_grown_bytes", "What it has grown by so far.", lambda seen: g.grown if (g := seen.run.host_growth) else None),
        Key("seconds_to_host_oom", "How long it is at that rate until the host has no more.", lambda seen: g.left.seconds if (g := seen.run.host_growth) and g.left else None),
        Key("seconds_to_host_oom_lower", "At least so long.", lambda seen: g.left.lower if (g := seen.run.host_growth) and g.left else None),
        Key("seconds_to_host_oom_upper", "At most so long; not there where it may never come.", lambda seen: g.left.upper if (g := seen.run.host_growth) and g.left else None),
        Key("unresolved_devices", "Devices of the run that could not be told to be a certain GPU.", lambda seen: seen.run.unresolved or None),
        Key("devices", "Its GPUs and MIG instances.", _devices, part=DEVICE),
    ),
)
# fmt: on


def write_runs(
    judged: Judged, user_name: Callable[[int], str], pace: Callable[[str], float | None]
) -> tuple[list[Json], int]:
    """Write the runs of a poll: those that go on first, then the worst, then the newest; and say how many there are not.

    `pace` gives the steps a second of a run by its id.
    """
    ordered = sorted(judged.runs, key=lambda each: (not each[0].up, -GRAVITIES.index(gravest(each[1])), -each[0].began))
    chosen = ordered[:MOST_RUNS]
    written = [
        RUN.write(
            SeenRun(run, judged.state, troubles, _user(run, user_name), pace(run.peer.run_id) if run.up else None)
        )
        for run, troubles in chosen
    ]
    return written, len(ordered) - len(chosen)


def _user(run: Run, user_name: Callable[[int], str]) -> str | None:
    name = user_name(run.peer.uid)
    return None if name == str(run.peer.uid) else name
