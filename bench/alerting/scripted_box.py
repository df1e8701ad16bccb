"""Simulated host with scripted processes, and the daemon that polls it in simulated time.

Its boards follow their load. What they lack is scripted at the same place: as answers of NVML functions, and as lines
of the kernel log. Everything above, up to the metrics, is the daemon's own code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from board import NO_LOAD, Board, Load
from faulty_simulation import FaultyGpu
from history import Clock
from jobs import Job, ScriptedProcess
from scripted_gpus import GIB, ScriptedSimulation

from gpuwarden.capture.capture_file import Frame
from gpuwarden.config.schema import Config
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.daemon.metrics_page import TABLES, read_tables
from gpuwarden.daemon.sources import Source
from gpuwarden.host.host_reader import Host, HostSpace
from gpuwarden.host.kernel_log import KernelRecord
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.metrics.exposition import Exposition
from gpuwarden.metrics.model import Metric, Table, TableReadings
from gpuwarden.owners.processes import ProcessIdentity
from gpuwarden.protocol.messages import Message

USERS = {1000: "ada", 1001: "grace", 1002: "hedy", 1003: "joan", 1004: "karen"}
_FIRST_PID = 1 << 23  # above the kernel's most: never a real process
_FIELDS = "nvmlDeviceGetFieldValues"
_GENERATION = "nvmlDeviceGetCurrPcieLinkGeneration"
_HOST = Host(
    memory_size=1024 * GIB, memory_available=700 * GIB, swap=HostSpace(8 * GIB, 0), shm=HostSpace(512 * GIB, 20 * GIB),
    cpus=128, oom_kills=0,
)  # fmt: skip

# No rule looks at what these take: memory samples between polls, by the wall clock, and GPM.
QUIET = replace(Config(), poll=replace(Config().poll, memory_interval=1.0), gpus=replace(Config().gpus, gpm=False))

Answer = Callable[..., Any]


class RoomBoard(Board):
    """Board in a room that gets warmer: by `warmer` degrees; `most` is the highest temperature of the board then."""

    warmer, most = 0.0, float("inf")

    def __init__(self, rng: random.Random, *, slot: int, processes: Callable[[], list[tuple[int, int]]]) -> None:
        super().__init__(rng, slot=slot)
        self.processes = processes

    def block_cooling(self, cooling: float) -> None:
        """Let it lose only that part of its heat."""
        self._resistance /= cooling

    @property
    def temperature(self) -> float:
        """Core temperature in celsius."""
        return min(super().temperature + self.warmer, self.most) if self.warmer else super().temperature


class ScriptedBox(ScriptedSimulation):
    """Simulated host. `script` and `script_field` replace a GPU's answers; `log` writes a line into the kernel log."""

    def __init__(self, jobs: Iterable[Job], gpus: int, clock: Clock, seed: int = 1) -> None:
        self.processes: list[ScriptedProcess] = []
        self.statuses: list[tuple[ProcessKey, int]] = []  # of ended processes, from the kernel
        self._coming = sorted(jobs, key=lambda job: job.begin, reverse=True)
        self._pids = iter(range(_FIRST_PID, 2 * _FIRST_PID))
        self._ended: list[ScriptedProcess] = []
        rng = random.Random(seed)  # noqa: S311 - a simulation, no secret
        self.boards = [
            RoomBoard(random.Random(rng.random()), slot=index, processes=partial(self._memory_on, index))  # noqa: S311 - likewise
            for index in range(gpus)
        ]
        self._scripts: list[dict[str, Answer]] = [{_GENERATION: partial(_generation, board)} for board in self.boards]
        self._fields: list[dict[int, Callable[[int], float | None]]] = [{} for _ in range(gpus)]
        self._records: list[KernelRecord] = []
        self._start, self._advanced = clock.monotonic(), 0.0
        self._box_clock = clock
        super().__init__(self.boards, clock.monotonic)

    def script(self, index: int, function: str, answer: Answer) -> None:
        """Replace a GPU's answers to a function of NVML: `answer` gets the GPU, and the other arguments."""
        self._scripts[index][function] = answer

    def script_field(self, index: int, number: int, answer: Callable[[int], float | None]) -> None:
        """Replace a GPU's answers to a field: `answer` gets the scope; None is not supported."""
        self._fields[index][number] = answer
        self._scripts[index][_FIELDS] = partial(_scripted_fields, self._fields[index])

    def log(self, line: str) -> None:
        """Log a line, now."""
        now = self._box_clock.now
        self._records.append(KernelRecord(line.encode(), now, now, self._box_clock.time()))

    def log_xid(self, index: int, code: int, text: str = "") -> None:
        """Log an XID of a GPU like the driver."""
        self.log(f"NVRM: Xid (PCI:0000:{0x10 + index:02x}:00): {code}, {text or 'pid=1, name=python'}")

    def logged(self) -> list[KernelRecord]:
        """Return the lines logged since the last call."""
        records, self._records = self._records, []
        return records

    def _catch_up(self) -> None:
        """Advance all processes and boards to this moment, in one step."""
        now = self._clock() - self._start
        seconds, self._advanced = now - self._advanced, now
        if not seconds:
            return
        while self._coming and self._coming[-1].begin <= now:
            job = self._coming.pop()
            self.processes.append(ScriptedProcess(job, next(self._pids), [self.uuid(n) for n in job.gpus]))
        for each in self.processes:
            each.advance(now)
        for each in [each for each in self.processes if each.gone]:
            self.processes.remove(each)
            self._ended.append(each)
            if each.job.ending.killed_for_memory:
                self.log(f"Out of memory: Killed process {each.peer.pid} (python) total-vm:9kB")
        for index, board in enumerate(self.boards):
            board.advance(seconds, _combined_load([process.load for process in self._processes_on(index)]))

    def _processes_on(self, index: int) -> list[ScriptedProcess]:
        return [each for each in self.processes if index in each.job.gpus]

    def _memory_on(self, index: int) -> list[tuple[int, int]]:
        return [(each.peer.pid, memory) for each in self._processes_on(index) if (memory := each.memory) is not None]

    def connect_runs(self) -> None:
        """Connect the processes to a new daemon, which knows nothing of those that ended before."""
        self._ended = []
        for process in self.processes:
            process.reconnect()

    def messages(self) -> Iterator[tuple[ProcessKey, Message | None]]:
        """Yield the messages of all processes, those that ended first."""
        for each in self._ended:
            yield from each.messages()
            if each.job.ending.status is not None:
                self.statuses.append((each.peer, each.job.ending.status))
        self._ended = []
        for each in self.processes:
            yield from each.messages()

    def reports(self) -> list[tuple[ProcessKey, Message | None]]:
        """Return the messages since the last call."""
        self._catch_up()
        return list(self.messages())

    def identify(self, pids: Iterable[int]) -> Mapping[int, ProcessIdentity]:
        """Return the identities of the processes among these."""
        wanted = set(pids)
        return {each.peer.pid: each.identity for each in self.processes if each.peer.pid in wanted}

    def _frame(self) -> Frame:
        self._catch_up()
        return super()._frame()

    def _answer(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        scripted = self._scripts[args[0]].get(name) if args and isinstance(args[0], int) else None
        if scripted is None:
            return super()._answer(name, function, *args)
        gpu = self.gpu(args[0])
        gpu.check(name)
        return scripted(gpu, *args[1:])


class WatchedBox:
    """Daemon on a scripted host: `page` polls and returns a scrape; `restart` starts another daemon."""

    def __init__(self, box: ScriptedBox, clock: Clock, config: Config | None = None) -> None:
        self.box = box
        self._clock = clock
        self._config = config or QUIET
        self.down, self.hung = False, False
        self._page: str | None = None
        self.restart()

    @property
    def now(self) -> float:
        """Seconds since the start of the host."""
        return self._clock.now

    def restart(self) -> None:
        """Start a new daemon; runs connect to it."""
        source = Source(
            "simulated",
            self.box.nvml,
            reports=self.box.reports,
            identify=self.box.identify,
            user_name=USERS.__getitem__,
            clock=self._clock.monotonic,
        )
        self._daemon, self._exposition = Daemon(self._config, source), Exposition()
        # Simulated GPUs are not this machine's: of these the daemon reads no kernel log, and its host is another too.
        pipeline = self._daemon.pipeline
        pipeline.kernel_log = _KernelLog(self.box)  # type: ignore[assignment] # as above
        pipeline.sees_host = True  # as above
        pipeline.host._reader.read = lambda: _HOST  # type: ignore[method-assign] # noqa: SLF001 - as above
        pipeline.host._trees.read = lambda peers: {}  # type: ignore[method-assign] # noqa: ARG005, SLF001 - as above
        self.box.connect_runs()

    async def page(self, names: frozenset[str]) -> str | None:
        """Poll, and return the families of these names; None without a daemon.

        Rendering all metrics would take most of the time of a poll here.
        """
        if self.down:
            return None
        if not self.hung:
            state = await self._daemon.poll()
            for peer, status in self.box.statuses:  # the daemon gets them from pidfds
                self._daemon.pipeline.registry.exited(peer, self._clock.now, status)
            self.box.statuses.clear()
            self._page = self._exposition.render(_select_readings(read_tables(state), names)).text.decode()
        return self._page


class _KernelLog:
    """Lines that the host's kernel logged, in place of the file."""

    readable, lost = True, 0

    def __init__(self, box: ScriptedBox) -> None:
        self._box = box

    def read(self) -> list[KernelRecord]:
        return self._box.logged()


def _combined_load(loads: Sequence[Load]) -> Load:
    """Return the load of several processes on one board."""
    busy = [load for load in loads if load.context]
    whole = sum(load.utilization for load in busy)
    if not busy:
        return NO_LOAD
    return Load(
        utilization=min(1.0, whole),
        bandwidth=min(1.0, sum(load.bandwidth for load in busy)),
        intensity=sum(load.intensity * load.utilization for load in busy) / whole if whole else 0.0,
        exchange=max(load.exchange for load in busy),
    )


def _select_readings(tables: Iterable[TableReadings], names: frozenset[str]) -> Iterator[TableReadings]:
    """Remove the readings of unwanted names; a histogram stays if any of its samples is wanted."""
    for table, subjects in tables:
        rows = _rows(names)[table]
        yield table, [(key, {row: readings[row] for row in rows if row in readings}) for key, readings in subjects]


@cache
def _rows(names: frozenset[str]) -> Mapping[type[Table[Any]], Sequence[Metric[Any]]]:
    return {table: [row for row in table.rows if any(name.startswith(row.name) for name in names)] for table in TABLES}


def _generation(board: Board, _gpu: FaultyGpu) -> int:
    """Return the PCIe generation of a link that saves power while idle."""
    return 5 if board.load.utilization else 1


def _scripted_fields(
    own: Mapping[int, Callable[[int], float | None]], gpu: FaultyGpu, fields: Sequence[tuple[int, int]]
) -> list[tuple[int, float | None]]:
    usual = gpu.usual(_FIELDS, fields)
    found = []
    for (number, scope), answer in zip(fields, usual, strict=True):
        scripted = own[number](scope) if number in own else None
        found.append((0, scripted) if scripted is not None else answer)
    return found
