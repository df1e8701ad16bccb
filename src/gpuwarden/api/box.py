"""`/api/v1/state`: the box at the last poll, for programs that show it."""

from __future__ import annotations

from collections.abc import Callable
from os import uname
from pathlib import Path
from typing import NamedTuple

from gpuwarden import thresholds
from gpuwarden.api.form import API_VERSION, Form, Json, Key, Written, as_json
from gpuwarden.api.gpus import GPU, GpuWriter
from gpuwarden.api.runs import MOST_RUNS, RUN, write_runs
from gpuwarden.api.troubles import BoxTrouble, box_condition, box_troubles, judge
from gpuwarden.gpu.advice import advice
from gpuwarden.gpu.owners import KINDS, Holder
from gpuwarden.gpu.snapshot import Gpu, GpuProcess
from gpuwarden.host import Host
from gpuwarden.recent.events import EVENT_KINDS, MOST_EVENTS, Event, RecentEvents
from gpuwarden.recent.series import RecentSeries
from gpuwarden.state import State

MOST_PROCESSES = 50
MOST_TROUBLES = 50


class Seen(NamedTuple):
    """What the answer is made from: a poll, what was so lately, and where the daemon listens."""

    state: State
    series: RecentSeries
    events: RecentEvents
    user_name: Callable[[int], str]
    socket: Path  # where runs report
    started: float  # the daemon, in Unix time


class _SeenProcess(NamedTuple):
    gpu: Gpu
    process: GpuProcess
    holder: Holder | None
    comm: str


class _Written(NamedTuple):
    """A poll with its GPUs and runs in JSON; of the runs so many are left out."""

    seen: Seen
    troubles: list[BoxTrouble]
    gpus: Written
    runs: list[Json]
    runs_dropped: int


def _processes(state: State) -> list[Json]:
    found = [(gpu, process) for gpu in state.snapshot.gpus for process in gpu.processes]
    found.sort(key=lambda pair: pair[1].memory or 0, reverse=True)
    holders, identities = state.owners.holders, state.owners.identities
    return [
        PROCESS.write(
            _SeenProcess(gpu, each, holders.get(each.pid), who.comm if (who := identities.get(each.pid)) else "")
        )
        for gpu, each in found[:MOST_PROCESSES]
    ]


def _processes_dropped(state: State) -> int | None:
    return max(sum(len(gpu.processes) for gpu in state.snapshot.gpus) - MOST_PROCESSES, 0) or None


def _cpu_seconds(host: Host) -> dict[str, float]:
    return {labels[0]: round(seconds, 2) for labels, seconds in host.cpu_seconds.items()}


def _stale_seconds(state: State) -> float:
    return max(thresholds.STALE_POLLS * state.poll_interval, thresholds.STALE_POLL_SECONDS)


def _of_holder(kind: str) -> Key[_SeenProcess]:
    place = KINDS.index(kind)
    meaning = {"user": "Whose it is: a name, else the id.", "run": "Its training run's id."}
    name = "run_id" if kind == "run" else kind
    return Key(
        name,
        meaning.get(kind, f"Its {kind.replace('_', ' ')}."),
        lambda seen: (seen.holder and seen.holder[place]) or None,
    )


# fmt: off
DAEMON = Form[Seen](
    "`daemon`",
    "The daemon, and the driver as a whole.",
    (
        Key("version", "Version of gpuwarden.", lambda seen: seen.state.version, always=True),
        Key("started_timestamp_seconds", "When it was started, in Unix time.", lambda seen: seen.started, always=True),
        Key("source", "nvml: this machine's GPUs; simulated or capture: not this machine's.", lambda seen: seen.state.source, always=True),
        Key("poll_interval_seconds", "Time between polls.", lambda seen: seen.state.poll_interval, always=True),
        Key("poll_duration_seconds", "How long the last one took.", lambda seen: seen.state.snapshot.duration, always=True),
        Key("runs_socket", "Where runs report: `GPUWARDEN_SOCKET` of theirs.", lambda seen: str(seen.socket), always=True),
        Key("driver_version", "Version of the GPU driver.", lambda seen: d.version if (d := seen.state.snapshot.driver) else None),
        Key("cuda_version", "The CUDA that it knows.", lambda seen: d.cuda_version if (d := seen.state.snapshot.driver) else None),
        Key("fault", "Why the driver as a whole does not answer.", lambda seen: seen.state.snapshot.fault),
        Key("fault_advice", "What to do about that.", lambda seen: advice(f) or None if (f := seen.state.snapshot.fault) else None),
        Key("paused_until_timestamp_seconds", "There during a pause: until when no GPU is read, in Unix time.", lambda seen: seen.state.snapshot.paused_until),
        Key("gpus_enumerated", "How many GPUs the driver counts.", lambda seen: seen.state.snapshot.enumerated),
        Key("gpus_asleep", "How many of them sleep, where they are let.", lambda seen: seen.state.snapshot.asleep_count),
    ),
)
HOST = Form[Host](
    "`host`",
    "The machine around the GPUs, as of the last look (`poll.slow_interval`).",
    (
        Key("name", "What the host calls itself; in a container, that.", lambda _: uname().nodename, always=True),
        Key("memory_size_bytes", "Memory of the host.", lambda host: host.memory_size),
        Key("memory_available_bytes", "What processes can still get of it.", lambda host: host.memory_available),
        Key("swap_size_bytes", "Swap space.", lambda host: host.swap.size if host.swap else None),
        Key("swap_used_bytes", "What of it is in use.", lambda host: host.swap.used if host.swap else None),
        Key("shm_size_bytes", "Shared memory that there can be (`/dev/shm`).", lambda host: host.shm.size if host.shm else None),
        Key("shm_used_bytes", "What of it is in use.", lambda host: host.shm.used if host.shm else None),
        Key("cpus", "CPUs that are online.", lambda host: host.cpus),
        Key("cpu_seconds", "Time of all CPUs since boot by mode (busy, iowait, idle, steal), which sum up to all time.", _cpu_seconds),
        Key("oom_kills", "Processes that the kernel killed for memory since boot.", lambda host: host.oom_kills),
    ),
)
THRESHOLDS = Form[State](
    "`thresholds`",
    "Where readings begin to mean trouble, as the alert rules have it: for whoever colors what is shown.",
    (
        Key("headroom_warning_ratio", "Headroom of a run, by what it uses and can still allocate, where pressure begins.", lambda _: thresholds.LITTLE_MEMORY, always=True),
        Key("headroom_critical_ratio", "Likewise, where it is critical.", lambda _: thresholds.NEAR_OUT_OF_MEMORY, always=True),
        Key("oom_warning_seconds", "Time to out-of-memory where pressure begins.", lambda _: thresholds.OUT_OF_MEMORY_AHEAD_SECONDS, always=True),
        Key("oom_critical_seconds", "Likewise, where it is critical.", lambda _: thresholds.OUT_OF_MEMORY_SOON_SECONDS, always=True),
        Key("temperature_margin_warning_celsius", "Degrees left before a GPU slows itself down, where pressure begins.", lambda _: thresholds.NEAR_SLOWDOWN, always=True),
        Key("temperature_margin_critical_celsius", "Likewise, where it is critical.", lambda _: thresholds.SLOWDOWN, always=True),
        Key("input_wait_warning_ratio", "Of the time of steps, the part in which they wait for input, from which on that is a trouble.", lambda _: thresholds.INPUT_BOUND, always=True),
        Key("poll_stale_seconds", "Age of the last poll from which on it no longer tells of now.", _stale_seconds, always=True),
        Key("xid_seconds", "How long an XID is told of.", lambda _: thresholds.XID_SECONDS, always=True),
    ),
)
PROCESS = Form[_SeenProcess](
    "Each of `processes`",
    "A process that holds memory of a GPU; one that is on several stands there once each.",
    (
        Key("pid", "Its pid.", lambda seen: seen.process.pid, always=True),
        Key("uuid", "The GPU's UUID.", lambda seen: seen.gpu.identity.uuid, always=True),
        Key("instance_uuid", "The MIG instance's.", lambda seen: seen.process.instance),
        Key("type", "compute or graphics.", lambda seen: seen.process.type, always=True),
        Key("memory_bytes", "What it holds, where the driver tells.", lambda seen: seen.process.memory),
        Key("command", "Name of its program.", lambda seen: seen.comm or None),
        *map(_of_holder, KINDS),
    ),
)
BOX_TROUBLE = Form[BoxTrouble](
    "Each of the box's `troubles`",
    "One thing that is wrong with the driver, a GPU, or a run that goes on or has ended within five minutes.",
    (
        Key("level", "How grave it is: warning or critical, as in the alerts.", lambda each: each.level, always=True),
        Key("text", "What it is, in a few words.", lambda each: each.text, always=True),
        Key("name", "What it is about: the driver, a GPU by its number, or a run by its name.", lambda each: each.name, always=True),
        Key("uuid", "The GPU.", lambda each: each.uuid),
        Key("run_id", "The run.", lambda each: each.run_id),
    ),
)
EVENT = Form[Event](
    "Each of `events`",
    "Something that happened to the box.",
    (
        Key("timestamp_seconds", "When, in Unix time.", lambda event: event.at, always=True),
        Key("kind", f"One of {', '.join(EVENT_KINDS)}.", lambda event: event.kind, always=True),
        Key("level", "info, warning or critical.", lambda event: event.level, always=True),
        Key("text", "What it was, in a sentence.", lambda event: event.text, always=True),
        Key("uuid", "The GPU or MIG instance that it is about.", lambda event: event.uuid),
        Key("run_id", "The run that it is about.", lambda event: event.run_id),
    ),
)
STATE = Form[_Written](
    "`/api/v1/state`",
    "The box at the last poll.",
    (
        Key("version", f"Version of this form: {API_VERSION}. A later one may add keys, and no other change.", lambda _: API_VERSION, always=True),
        Key("polled_timestamp_seconds", "When the poll was, in Unix time.", lambda each: each.seen.state.snapshot.time, always=True),
        Key("condition", "ok, warning or critical: the worst of its troubles; unknown where no GPU was asked.", lambda each: box_condition(each.seen.state, each.troubles), always=True),
        Key("troubles", f"What is wrong with the box, the worst first, {MOST_TROUBLES} at most.", lambda each: [BOX_TROUBLE.write(trouble) for trouble in each.troubles[:MOST_TROUBLES]], part=BOX_TROUBLE),
        Key("troubles_dropped", "How many more there are.", lambda each: max(len(each.troubles) - MOST_TROUBLES, 0) or None),
        Key("daemon", "The daemon.", lambda each: DAEMON.write(each.seen), always=True, part=DAEMON),
        Key("host", "The machine.", lambda each: HOST.write(each.seen.state.host), always=True, part=HOST),
        Key("thresholds", "Where readings begin to mean trouble.", lambda each: THRESHOLDS.write(each.seen.state), always=True, part=THRESHOLDS),
        Key("gpus", "The GPUs that are known.", lambda each: each.gpus, always=True, part=GPU),
        Key("runs", f"Training runs, {MOST_RUNS} at most: those that go on first, then the worst, then the newest.", lambda each: each.runs, always=True, part=RUN),
        Key("runs_dropped", "How many more there are.", lambda each: each.runs_dropped or None),
        Key("processes", f"Who holds memory, those with most first, {MOST_PROCESSES} at most.", lambda each: _processes(each.seen.state), always=True, part=PROCESS),
        Key("processes_dropped", "How many more there are.", lambda each: _processes_dropped(each.seen.state)),
        Key("events", f"The last {MOST_EVENTS} events since the daemon was started, the newest first.", lambda each: [EVENT.write(event) for event in each.seen.events.newest_first()], always=True, part=EVENT),
    ),
)
# fmt: on


class StateWriter:
    """Writes `/api/v1/state`, poll by poll."""

    def __init__(self) -> None:
        self._gpus = GpuWriter()

    def write(self, seen: Seen) -> bytes:
        """Return the answer; about 1 ms for a box of 8 GPUs and 8 runs."""
        judged = judge(seen.state)
        runs, dropped = write_runs(judged, seen.user_name, seen.series.pace)
        return as_json(STATE.write(_Written(seen, box_troubles(judged), self._gpus.write(judged), runs, dropped)))
