"""Scenarios that pin the daemon's behavior: training runs and GPUs, poll by poll, on `scenario_daemon.Box`.

Each is a coroutine that moves a `Stage`: it sets what runs and GPUs do, lets time pass, and pins the documents at the
end of each phase. tests/goldens/scenarios has a folder for each, which `make goldens` writes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

from scenario_daemon import GIB, INTERVAL, Box, run_scenario

from gpuwarden.protocol.messages import (
    STEP_BUCKETS,
    Allocation,
    DeviceMemory,
    End,
    Error,
    Hello,
    Phase,
    Report,
    uncaught_reason,
)

MIB = 1 << 20
CONTEXT = 600 * MIB  # of a process on a GPU, outside its allocator's pool
CAPACITY = (81559 - 479 - 4) * MIB  # bytes that processes can have of a simulated GPU
GPU_IS_LOST = 15  # return codes of NVML
DRIVER_NOT_LOADED = 9
SIGKILL = 9
TENSORFLOW = "tensorflow 2.21.0 keras 3.15.1"
JAX = "jax 0.8.1 keras 3.15.1"
MAX_LEAF = 250  # characters
DIGITS = 12  # of the numbers in the documents


@dataclass
class Trainer:
    """Training run on some GPUs, which reports before each poll; `in_use` bytes of a pool of `pool` on each."""

    box: Box
    name: str
    gpus: tuple[int, ...] = (0,)
    uid: int = 1000
    framework: str = TENSORFLOW
    in_use: int = 20 * GIB
    pool: int | None = None  # of a framework that takes its pool at once; None: it takes what is in use
    limit: int | None = None
    step_seconds: float = 0.5
    batch_size: int = 64
    slurm_job: str = ""
    job: str | None = None
    rank: int | None = None
    world_size: int | None = None
    phase: Phase = "train"
    stalled: bool = False
    silent: bool = False
    steps: int = 0
    peak: int = 0
    advice: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.peer = self.box.start(self.uid, slurm_job=self.slurm_job)
        self.box.use_host(self.peer, 6 * GIB)
        self.connect()

    def connect(self) -> None:
        """Introduce the run to the daemon."""
        devices: dict[str, str | None] = {f"GPU:{number}": self.box.uuid(gpu) for number, gpu in enumerate(self.gpus)}
        hello = Hello(
            self.name,
            self.framework,
            devices,
            job=self.job,
            rank=self.rank,
            world_size=self.world_size,
            hears=True,
        )
        self.box.send(self.peer, hello)

    def advance(self) -> None:
        """Train until the next poll."""
        if not self.stalled and self.phase == "train":
            self.steps += round(INTERVAL / self.step_seconds)
        self.peak = max(self.peak, self.in_use)
        for gpu in self.gpus:
            self.box.cards[gpu].memory[self.peer.pid] = CONTEXT + (self.pool or self.peak)
        if not self.silent:
            self.box.send(self.peer, self._report())

    def fail(self, requested: int, op: str = "model/dense_3/MatMul") -> None:
        """Report an out-of-memory, and end with it."""
        self.errors = {"device_oom": 1}
        shape = str(requested // 4)
        text = (
            f"OOM when allocating tensor with shape[{shape}] and type float on "
            f"/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:MatMul]"
        )
        asked = Allocation(requested, shape, "float", op, "GPU:0", "GPU_0_bfc")
        error = Error(
            "device_oom",
            "ResourceExhaustedError",
            text,
            self.phase,
            self.steps,
            (asked,),
            self._memory(),
            at=0,
            batch_size=self.batch_size,
            stage="forward",
            weights=3 * GIB,
            trainable=GIB,
        )
        self.box.send(self.peer, error)
        self.box.send(self.peer, self._report())
        self.box.send(self.peer, End(uncaught_reason("ResourceExhaustedError"), "failed"))
        self.box.end(self.peer)

    def finish(self) -> None:
        """End as a run does whose last epoch is over."""
        self.box.send(self.peer, self._report())
        self.box.send(self.peer, End("completed"))
        self.box.end(self.peer)

    def _memory(self) -> Mapping[str, DeviceMemory]:
        memory = DeviceMemory(self.in_use, self.peak, self.limit)
        return {f"GPU:{number}": memory for number in range(len(self.gpus))}

    def _report(self) -> Report:
        bucket = sum(bound < self.step_seconds for bound in STEP_BUCKETS)
        return Report(
            phase=self.phase,
            steps=self.steps,
            step_seconds=self.steps * self.step_seconds,
            step_buckets=tuple(self.steps * (each == bucket) for each in range(len(STEP_BUCKETS) + 1)),
            memory=self._memory(),
            epoch=self.steps // 100,
            batch=self.steps % 100,
            stepping=True,
            examples=self.steps * self.batch_size,
            step_median=self.step_seconds if self.steps else None,
            step_p95=self.step_seconds * 1.2 if self.steps else None,
            compile_seconds=8.0,
            input_wait_seconds=0.04 * self.steps * self.step_seconds,
            input_observed_seconds=self.steps * self.step_seconds,
            loss=round(2.0 / (1 + self.steps / 100), 6),
            errors=self.errors,
            batch_size=self.batch_size,
            largest_batch_size=self.batch_size,
        )


class Stage:
    """Box, the runs on it, and the documents that were pinned, which are text by file name."""

    def __init__(self, box: Box, *, whole: bool) -> None:
        self.box = box
        self.trainers: list[Trainer] = []
        self._page = _Changes(whole=whole)
        self._state = _Changes(whole=whole)

    def train(self, name: str, **settings: Any) -> Trainer:
        """Start a run."""
        trainer = Trainer(self.box, name, **settings)
        self.trainers.append(trainer)
        for gpu in trainer.gpus:
            self.box.cards[gpu].set_training()
        return trainer

    async def advance(self, seconds: float, each_poll: Callable[[], None] = lambda: None) -> None:
        """Advance the clock; `each_poll` is called before each poll."""
        for _ in range(round(seconds / INTERVAL)):
            each_poll()
            for trainer in self.trainers:
                trainer.advance()
            await self.box.poll()

    def remove(self, trainer: Trainer) -> None:
        """Remove a run that has ended; its GPUs idle."""
        self.trainers.remove(trainer)
        for gpu in trainer.gpus:
            if not any(gpu in each.gpus for each in self.trainers):
                self.box.cards[gpu].set_idle()

    async def pin(self, phase: str) -> None:
        """Pin the page and the state: what has changed since the last pin."""
        self.box.timeline.append(f"{self.box.clock.now:7.1f} -- pinned: {phase}")
        samples = (line.rpartition(" ") for line in (await self.box.page()).splitlines())
        self._page.add(phase, {name: f"{float(value):.{DIGITS}g}" for name, _space, value in samples})
        self._state.add(phase, dict(flatten(await self.box.state())))

    async def documents(self) -> dict[str, str]:
        """Return all documents, at the end."""
        records = await self.box.records()
        history = (f"{path} {value}" for path, value in flatten(await self.box.history(), lists=False))
        documents = {
            "page.prom": _text(self._page.lines),
            "state.txt": _text(self._state.lines),
            "history.txt": _text(history),
            "timeline.txt": _text(self.box.timeline),
            "records.txt": _text(f"{path} {value}" for path, value in flatten(_without_copies(records))),
            "runs.txt": await self.box.runs_text(records),
        }
        for index in range(len(self.box.cards)):
            documents = {file: text.replace(self.box.uuid(index), f"GPU-{index}") for file, text in documents.items()}
        return documents


class _Changes:
    """Lines of a document from pin to pin: the whole first one if requested, then the changes."""

    def __init__(self, *, whole: bool) -> None:
        self.lines: list[str] = []
        self._whole = whole
        self._now: dict[str, str] = {}
        self._last: dict[str, str] = {}  # of all that were ever there

    def add(self, phase: str, now: dict[str, str]) -> None:
        """Add a document: its values by name."""
        before, self._now = self._now, now
        last, self._last = self._last, {**self._last, **now}
        if not before:
            self.lines.append(f"# {phase}" if self._whole else f"# {phase}: later changes refer to this, not shown")
            self.lines += [f"{name} {value}" for name, value in now.items() if self._whole]
            return
        self.lines.append(f"# {phase}: changes")
        back = {name for name in now.keys() - before.keys() if last.get(name) == now[name]}
        changed = (name for name, value in now.items() if before.get(name) != value and name not in back)
        self.lines += sorted(f"{name} {now[name]}" for name in changed)
        self.lines += self._group(back, "back as it was")
        self.lines += self._group(before.keys() - now.keys(), "gone")

    def _group(self, names: Iterable[str], what: str) -> list[str]:
        """Write which series or values appeared or disappeared together, as the count of each metric or object."""
        count = Counter(name.partition("{")[0] if "{" in name else name.rpartition(".")[0] or name for name in names)
        text = ", ".join(f"{group} ({count[group]})" for group in sorted(count))
        return wrap(f"{what}: {text}", 116, subsequent_indent="  ", break_on_hyphens=False) if count else []


def _without_copies(records: Any) -> Any:
    """Leave out of the listing what the whole records have alike."""
    listing, whole = records["listing"], records["records"]
    differing = {
        record["run_id"]: {name: value for name, value in record.items() if whole[record["run_id"]].get(name) != value}
        for record in (*listing["live"], *listing["past"])
    }
    order = {kind: [record["run_id"] for record in listing[kind]] for kind in ("live", "past")}
    lacking = {
        record["run_id"]: sorted(whole[record["run_id"]].keys() - record.keys())
        for record in (*listing["live"], *listing["past"])
    }
    return {**listing, **order, "listed_otherwise": differing, "listed_without": lacking, "records": whole}


def flatten(value: Any, path: str = "", *, lists: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the leaves of a document by their paths.

    Lists and short objects of numbers alone are one leaf, other lists too without `lists`.
    """
    if isinstance(value, dict) and not _is_short(value):
        for name, each in value.items():
            yield from flatten(each, f"{path}.{name}" if path else name, lists=lists)
    elif isinstance(value, list) and lists and any(isinstance(each, (dict, list)) for each in value):
        for number, each in enumerate(value):
            yield from flatten(each, f"{path}[{number}]", lists=lists)
    else:
        yield path, json.dumps(_round(value), ensure_ascii=False)


def _is_short(values: dict[str, Any]) -> bool:
    return all(isinstance(each, (int, float)) for each in values.values()) and len(str(values)) <= MAX_LEAF


def _round(value: Any) -> Any:
    """Round the numbers of a leaf, whose last digits depend on the order of additions."""
    if isinstance(value, dict):
        return {name: _round(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_round(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


async def healthy(stage: Stage) -> None:
    """Train on one of two GPUs and finish; a second run still trains at the end."""
    await stage.advance(INTERVAL)
    await stage.pin("idle")
    run = stage.train("resnet50", pool=70 * GIB, in_use=30 * GIB, slurm_job="4711")
    await stage.advance(180)
    await stage.pin("training")
    run.finish()
    stage.remove(run)
    await stage.advance(30)
    await stage.pin("finished")
    stage.train("resnet50", pool=70 * GIB, in_use=34 * GIB, slurm_job="4712", batch_size=96)
    await stage.advance(60)
    await stage.pin("a second run")


async def leak(stage: Stage) -> None:
    """Grow with every step until an allocation fails."""
    run = stage.train("unet", uid=1001, in_use=20 * GIB)

    def grow() -> None:
        run.in_use += 600 * MIB

    await stage.advance(30)
    await stage.pin("before the leak")
    await stage.advance(240, grow)
    await stage.pin("leak")
    await stage.advance(240, grow)
    await stage.pin("shortly before the end")
    while run.in_use + 600 * MIB < CAPACITY - CONTEXT:
        await stage.advance(INTERVAL, grow)
    run.fail(900 * MIB)
    stage.remove(run)
    await stage.advance(INTERVAL)
    await stage.pin("out of memory")
    await stage.advance(120)
    await stage.pin("afterwards")


async def lost_gpu(stage: Stage) -> None:
    """Lose the GPU of a run, with an XID in the kernel log; it answers again after two minutes."""
    stage.train("bert", gpus=(1,), framework=JAX, pool=60 * GIB, in_use=40 * GIB, limit=60 * GIB)
    await stage.advance(60)
    await stage.pin("training")
    stage.box.log_xid(1, 79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    stage.box.gpu(1).lose(GPU_IS_LOST)
    stage.trainers[0].stalled = True
    await stage.advance(120)
    await stage.pin("lost")
    stage.box.gpu(1).restore()
    stage.trainers[0].stalled = False
    await stage.advance(180)
    await stage.pin("answers again")


async def out_of_memory(stage: Stage) -> None:
    """Fail in the first step, which needs more than the GPU has; a second run trains with a smaller batch."""
    run = stage.train("gpt", uid=1002, in_use=12 * GIB, batch_size=512)
    run.stalled = True  # no step yet
    await stage.advance(20)
    run.fail(90 * GIB)
    stage.remove(run)
    await stage.advance(30)
    await stage.pin("failed")
    run = stage.train("gpt", uid=1002, in_use=40 * GIB, batch_size=128)
    await stage.advance(90)
    await stage.pin("a smaller batch")


async def throttling(stage: Stage) -> None:
    """Heat the GPU of a run until software and then hardware slows it down; then cool it."""
    card = stage.box.cards[0]
    stage.train("vit", in_use=30 * GIB)
    await stage.advance(60)
    await stage.pin("cool")
    card.set_training(temperature=83, power=650, reasons="sw_power_cap")
    await stage.advance(90)
    await stage.pin("hot")
    card.set_training(temperature=87, power=600, clock=1500, reasons="sw_thermal_slowdown")
    await stage.advance(180)
    await stage.pin("slowed by software")
    card.set_training(temperature=90, power=400, clock=990, reasons="hw_slowdown hw_thermal_slowdown")
    stage.box.log_xid(0, 63, "pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping")
    await stage.advance(120)
    await stage.pin("slowed by hardware")
    card.set_training()
    await stage.advance(240)
    await stage.pin("cool again")


async def ranks(stage: Stage) -> None:
    """Stall a job on three GPUs for rank 1, resume it, and kill rank 2, after which the others stall."""
    for rank in range(3):
        stage.train("llama", gpus=(rank,), in_use=30 * GIB, job="llama-7", rank=rank, world_size=3, slurm_job="99")
    await stage.advance(120)
    await stage.pin("training")
    for trainer in stage.trainers:
        trainer.stalled = True
        stage.box.cards[trainer.gpus[0]].utilization_percent = 100 if trainer.rank != 1 else 0
    await stage.advance(120)
    await stage.pin("rank 1 stalls")
    for trainer in stage.trainers:
        trainer.stalled = False
        stage.box.cards[trainer.gpus[0]].set_training()
    await stage.advance(30)
    await stage.pin("training again")
    killed = stage.trainers[2]
    stage.box.log_xid(2, 31, f"pid={killed.peer.pid}, name=python, Ch 00000008, MMU Fault: ENGINE GRAPHICS")
    stage.box.end(killed.peer, SIGKILL)
    stage.remove(killed)
    for trainer in stage.trainers:
        trainer.stalled = True
    await stage.advance(150)
    await stage.pin("rank 2 was killed")


async def co_tenant(stage: Stage) -> None:
    """Let another user's process take memory on the GPU of a run, which then runs out of it."""
    run = stage.train("diffusion", in_use=30 * GIB)
    await stage.advance(60)
    await stage.pin("alone")
    other = stage.box.start(1002, comm="jupyter", unit="jupyter.service")
    memory = stage.box.cards[0].memory
    memory[other.pid] = 2 * GIB

    def grow() -> None:
        memory[other.pid] += GIB

    await stage.advance(150, grow)
    await stage.pin("the co_tenant grows")
    memory[other.pid] = CAPACITY - memory[run.peer.pid] - GIB
    await stage.advance(60)
    await stage.pin("the co_tenant has taken most")
    run.fail(4 * GIB)
    stage.remove(run)
    await stage.advance(30)
    await stage.pin("out of memory")


async def host_memory(stage: Stage) -> None:
    """Grow in host memory until the kernel's OOM killer ends the run."""
    run = stage.train("tabular", in_use=10 * GIB, uid=1001)
    held = 6 * GIB

    def grow() -> None:
        nonlocal held
        held += 1200 * MIB
        stage.box.host_available = 200 * GIB - held
        stage.box.use_host(run.peer, held)

    await stage.advance(60)
    await stage.pin("before")
    await stage.advance(600, grow)
    await stage.pin("host memory grows")
    while held < 196 * GIB:
        await stage.advance(INTERVAL, grow)
    await stage.pin("shortly before the end")
    place = "nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/user.slice,task=python"
    stage.box.log_kernel(f"oom-kill:constraint=CONSTRAINT_NONE,{place},pid={run.peer.pid},uid=1001")
    stage.box.host_available = 200 * GIB
    stage.box.end(run.peer, SIGKILL)
    stage.remove(run)
    await stage.advance(60)
    await stage.pin("killed")


async def driver(stage: Stage) -> None:
    """Unload the driver and load it again, make it hang for some polls, and release it by a pause."""
    stage.train("resnet", in_use=30 * GIB)
    await stage.advance(60)
    await stage.pin("training")
    stage.box.break_driver(DRIVER_NOT_LOADED)
    await stage.advance(90)
    await stage.pin("unloaded")
    await stage.box.restore_driver()
    await stage.advance(60)
    await stage.pin("loaded again")
    stage.box.hang_driver()
    await stage.advance(60)
    await stage.pin("hung")
    await stage.box.restore_driver()
    await stage.advance(60)
    await stage.pin("answers again")
    await stage.box.pause(20)
    await stage.pin("paused")
    await stage.advance(60)
    await stage.pin("after the pause")


async def restart(stage: Stage) -> None:
    """Restart the daemon under two runs, one of which is near out of memory and one of which ends meanwhile."""
    full = stage.train("bert", in_use=76 * GIB)
    ends = stage.train("resnet", gpus=(1,), in_use=20 * GIB, uid=1002)
    await stage.advance(120)
    await stage.pin("before")
    stage.remove(ends)
    stage.box.end(ends.peer)
    stage.box.hide_ends()
    await stage.box.restart(30)
    full.connect()
    await stage.advance(INTERVAL)
    await stage.pin("the first poll of the next daemon")
    await stage.advance(60)
    full.in_use, full.pool = 30 * GIB, 31 * GIB
    await stage.advance(180)
    await stage.pin("memory released")
    full.finish()
    stage.remove(full)
    await stage.advance(30)
    await stage.pin("finished")


@dataclass(frozen=True)
class Scenario:
    """One scenario: its coroutine, and the number of GPUs."""

    play: Callable[[Stage], Coroutine[Any, Any, None]]
    gpus: int = 1


SCENARIOS = {
    "healthy": Scenario(healthy, 2),
    "leak": Scenario(leak),
    "out_of_memory": Scenario(out_of_memory),
    "co_tenant": Scenario(co_tenant),
    "host_memory": Scenario(host_memory),
    "lost_gpu": Scenario(lost_gpu, 2),
    "throttling": Scenario(throttling),
    "ranks": Scenario(ranks, 3),
    "driver": Scenario(driver),
    "restart": Scenario(restart, 2),
}


def documents(name: str, folder: Path) -> dict[str, str]:
    """Run a scenario and return its documents by file name; `folder` is empty, for the daemon's files."""
    scenario = SCENARIOS[name]
    made: dict[str, str] = {}

    async def script(box: Box) -> None:
        stage = Stage(box, whole=name == "healthy")
        await scenario.play(stage)
        made.update(await stage.documents())

    run_scenario(script, scenario.gpus, folder)
    return made
