"""Week of a busy and healthy host with eight GPUs: much looks like trouble, and nothing is wrong.

The users of each GPU have a habit. No alert should page a person, or ask for attention.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from board import NO_LOAD, Load
from faulty_simulation import SLOWDOWN, FaultyGpu
from jobs import FEEDING, FINISHED, HOLDING, INTERRUPTED, Act, Job
from scenes import BUSY, HOUR, NEARLY_ALL, Scene, make_start, make_steps, schedule
from scripted_box import WatchedBox
from scripted_gpus import GIB, SIZE

from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import ECC_LIFETIMES, ECC_TYPES, MEMORY_LOCATIONS

MINUTE, DAY = 60.0, 86400.0
GPUS = 8
HOTTEST = SLOWDOWN - 8.0  # celsius, on warm days
WARM_DAYS, WARM_HOURS = (2, 3, 4), (11.0, 18.0)
_ERRORS = "nvmlDeviceGetMemoryErrorCounter"
_HUNGRY = Load(utilization=0.98, bandwidth=0.55, intensity=0.99, exchange=0.12)  # meets the power limit
_LIGHT = Load(utilization=0.55, bandwidth=0.2, intensity=0.5)

Rng = random.Random


@dataclass(frozen=True, slots=True)
class Habit:
    """Recurring job of some GPUs, and the range of idle time before the next one."""

    gpus: tuple[int, ...]
    job: Callable[[float, Rng], Job]
    idle: tuple[float, float]


def _epochs(rng: Rng, number: int, of: Callable[[int], Act], checkpoint: tuple[float, float]) -> Iterator[Act]:
    """Yield epochs, each with its validation and a checkpoint, during which there is no step."""
    for epoch in range(number):
        yield replace(of(epoch), epoch=epoch)
        yield Act(rng.uniform(45, 180), replace(BUSY, intensity=0.5), "test", epoch=epoch)
        yield Act(rng.uniform(*checkpoint), FEEDING, "train", epoch=epoch)


def _preallocating(begin: float, rng: Rng) -> Job:
    """Allocate 97 % of the device's memory at start and use half of it; some are stopped by Ctrl-C."""
    memory = rng.uniform(28, 44) * GIB
    length, number = rng.uniform(10, 40) * MINUTE, rng.randint(6, 14)
    acts = [*make_start(6 * GIB), make_steps(120, memory=(memory, memory), peak=4 * GIB)]
    acts += _epochs(rng, number, lambda _epoch: make_steps(length, peak=4 * GIB), (20, 150))
    stopped = rng.random() < 0.25
    if stopped:
        acts = [*acts[: -rng.randint(1, 6)], make_steps(rng.uniform(60, 600), peak=4 * GIB)]
    return Job(begin, acts, (0,), "resnet50", pool=NEARLY_ALL, ending=INTERRUPTED if stopped else FINISHED)


def _growing(begin: float, rng: Rng) -> Job:
    """Allocate memory when needed: little at first, and most of it within the first epoch."""
    memory, length = rng.uniform(48, 64) * GIB, rng.uniform(8, 25) * MINUTE
    acts = [*make_start(1 * GIB), make_steps(rng.uniform(60, 240), memory=(1 * GIB, 1 * GIB), peak=0.5 * GIB)]
    acts += [make_steps(rng.uniform(60, 300), memory=(memory, memory), peak=3 * GIB)]
    acts += _epochs(rng, rng.randint(5, 12), lambda _epoch: make_steps(length, peak=3 * GIB, step=0.45), (5, 60))
    return Job(begin, acts, (1,), "unet", uid=1001)


def _warming_up(begin: float, rng: Rng) -> Job:
    """Start with small batches and double them every half hour."""
    base, acts = 12 * GIB, list(make_start(4 * GIB))
    for stage, batch in enumerate((16, 32, 64, 128, 256)):
        high = 3.2 * GIB * 2**stage
        memory = base + 0.15 * high
        seconds = rng.uniform(20, 35) * MINUTE if batch < 256 else rng.uniform(1, 3) * HOUR
        acts.append(make_steps(seconds, memory=(memory, memory), peak=0.85 * high, epoch=stage, batch=batch))
    return Job(begin, acts, (1,), "warm-up", uid=1001)


def _growth(begin: float, rng: Rng) -> Job:
    return (_growing if rng.random() < 0.6 else _warming_up)(begin, rng)


def _distributed(begin: float, rng: Rng) -> Job:
    """Train on two GPUs in a custom loop whose checkpoints are long steps."""
    acts = [*make_start(18 * GIB), make_steps(300, _HUNGRY, (46 * GIB, 46 * GIB), 8 * GIB, step=7.4, waits=None)]
    for _ in range(rng.randint(14, 26)):
        acts.append(make_steps(30 * MINUTE, _HUNGRY, peak=8 * GIB, step=7.4, waits=None))
        acts.append(Act(rng.uniform(25, 55), FEEDING, "train", hangs=True))
    return Job(begin, acts, (2, 3), "vit-large", uid=1002, pool=NEARLY_ALL)


def _limited(begin: float, rng: Rng) -> Job:
    """Use JAX, whose allocator takes three quarters and reports it; nine tenths of them are in use."""
    limit = int(0.75 * SIZE)
    acts = [*make_start(9 * GIB), make_steps(200, memory=(0.87 * limit, 0.87 * limit), peak=0.04 * limit)]
    acts += _epochs(rng, rng.randint(8, 15), lambda _epoch: make_steps(15 * MINUTE, peak=0.04 * limit), (5, 40))
    return Job(begin, acts, (4,), "bert", "jax 0.8.1 keras 3.15.1", uid=1002, pool=limit, limit=limit)


def _evaluation(begin: float, rng: Rng) -> Job:
    """Evaluate or predict for some minutes, or train shortly on much input."""
    seconds = rng.uniform(4, 40) * MINUTE
    if rng.random() < 0.3:
        acts = [*make_start(2 * GIB), make_steps(seconds, _LIGHT, (7 * GIB, 7 * GIB), GIB, step=0.06, waits=0.36)]
    else:
        acts = [Act(10, NO_LOAD), Act(20, FEEDING, memory=(5 * GIB, 5 * GIB))]
        acts += [Act(seconds, _LIGHT, "test" if rng.random() < 0.5 else "predict", peak=9 * GIB)]
    return Job(begin, acts, (5,), "evaluation", pool=NEARLY_ALL if rng.random() < 0.5 else None)


def _notebook(begin: float, rng: Rng) -> Job:
    """Run a cell, pause for some minutes, run the next; half of the notebooks report. In the evening they end."""
    held, acts, reports = 4 * GIB, [Act(15, NO_LOAD), Act(30, FEEDING, memory=(2 * GIB, 4 * GIB))], rng.random() < 0.5
    while sum(act.seconds for act in acts) < rng.uniform(1.5, 5) * HOUR:
        more = min(held + rng.choice((0, 0, 1, 3)) * GIB, 30 * GIB)
        acts.append(make_steps(rng.uniform(20, 600), _LIGHT, (held, more), 2 * GIB, step=0.1, waits=0.2))
        acts.append(Act(rng.uniform(1, 25) * MINUTE, HOLDING, "idle"))
        held = more
    return Job(begin, acts, (6,), "notebook" if reports else "", uid=1002)


def _sweep(begin: float, rng: Rng) -> Job:
    """Try a setting with torch for an hour or so."""
    acts = [*make_start(3 * GIB), make_steps(rng.uniform(0.5, 1.5) * HOUR, memory=(20 * GIB, 20 * GIB), peak=6 * GIB)]
    return Job(begin, acts, (6,), "sweep", "torch 2.9.1", uid=1000, reports_reserved=True)


def _notebooks_and_trials(begin: float, rng: Rng) -> Job:
    """Run notebooks by day and trials by night."""
    return (_notebook if 9 <= begin % DAY / HOUR < 18 else _sweep)(begin, rng)


def _tight(begin: float, rng: Rng) -> Job:
    """Train for a day with nine tenths of all memory in use, by design."""
    acts = [*make_start(20 * GIB), make_steps(600, memory=(66 * GIB, 66 * GIB), peak=5 * GIB, step=1.1)]
    acts += _epochs(rng, rng.randint(18, 30), lambda _epoch: make_steps(50 * MINUTE, peak=5 * GIB, step=1.1), (10, 90))
    return Job(begin, acts, (7,), "llm-finetune", "torch 2.9.1", uid=1003, reports_reserved=True)


HABITS = (
    Habit((0,), _preallocating, (2 * MINUTE, 30 * MINUTE)),
    Habit((1,), _growth, (2 * MINUTE, 40 * MINUTE)),
    Habit((2, 3), _distributed, (5 * MINUTE, 2 * HOUR)),
    Habit((4,), _limited, (1 * MINUTE, 20 * MINUTE)),
    Habit((5,), _evaluation, (1 * MINUTE, 15 * MINUTE)),
    Habit((6,), _notebooks_and_trials, (3 * MINUTE, 40 * MINUTE)),
    Habit((7,), _tight, (10 * MINUTE, 3 * HOUR)),
)


def make_week(days: float = 7.0, seed: int = 1) -> Scene:
    """Return this many days of it, the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311 - a simulation, no secret
    seconds = days * DAY
    jobs = [job for habit in HABITS for job in _make_jobs(habit, seconds, random.Random(rng.random()))]  # noqa: S311
    jobs += _make_visitor_jobs(days, rng)
    events = [*_list_temperature_changes(days), *_list_small_errors(days, rng), *_list_restarts(days, rng)]
    events += [
        schedule(job.end + 1, lambda watched, index=job.gpus[0]: watched.box.log_xid(index, 45))  # type: ignore[misc] # bound
        for job in jobs
        if job.ending is INTERRUPTED and job.end < seconds
    ]
    return Scene(seconds, jobs, events, begin=0.0, gpus=GPUS)


def _make_jobs(habit: Habit, seconds: float, rng: Rng) -> Iterator[Job]:
    time = rng.uniform(0, 10 * MINUTE)
    while time < seconds:
        job = habit.job(time, rng)
        yield job
        time = job.end + rng.uniform(*habit.idle)


def _make_visitor_jobs(days: float, rng: Rng) -> Iterator[Job]:
    """Let a user try something small next to another user's run, every day."""
    for day in range(int(days) + 1):
        begin = day * DAY + rng.uniform(10, 17) * HOUR
        trial = Act(rng.uniform(2, 20) * MINUTE, _LIGHT, memory=(1 * GIB, 2 * GIB))
        yield Job(begin, (Act(10, NO_LOAD), trial), (1,), uid=1004)


def _list_temperature_changes(days: float) -> Iterator[tuple[float, Callable[[WatchedBox], object]]]:
    def warm(celsius: float, watched: WatchedBox) -> None:
        for board in watched.box.boards:
            board.warmer, board.most = celsius, HOTTEST

    for day in WARM_DAYS:
        if day < days:
            yield schedule(day * DAY + WARM_HOURS[0] * HOUR, partial(warm, 14.0))
            yield schedule(day * DAY + WARM_HOURS[1] * HOUR, partial(warm, 0.0))


def _list_restarts(days: float, rng: Rng) -> Iterator[tuple[float, Callable[[WatchedBox], object]]]:
    """Restart the daemon twice a day; it is away for up to half a minute."""
    for half in range(int(2 * days)):
        begin = half * DAY / 2 + rng.uniform(1, 11) * HOUR
        yield schedule(begin, lambda watched: setattr(watched, "down", True))
        yield schedule(begin + rng.uniform(5, 30), start_daemon)


def start_daemon(watched: WatchedBox) -> None:
    """Start another daemon."""
    watched.down = False
    watched.restart()


def _list_small_errors(days: float, rng: Rng) -> Iterator[tuple[float, Callable[[WatchedBox], object]]]:
    """Let ECC correct an error now and then, PCIe resend a packet, and a program's fault be cleaned up."""
    for number, time in enumerate(sorted(rng.uniform(0, days * DAY) for _ in range(int(2 * days)))):
        yield schedule(time, partial(_correct_errors, number + 1))
        yield schedule(time + HOUR, partial(_replay_packets, number + 1))
    for day in range(0, int(days), 2):
        yield schedule(day * DAY + rng.uniform(9, 18) * HOUR, lambda watched: watched.box.log_xid(5, 43))


def _correct_errors(count: int, watched: WatchedBox) -> None:
    def answer(gpu: FaultyGpu, kind: int, lifetime: int, location: int) -> int:
        known: int = gpu.usual(_ERRORS, kind, lifetime, location)
        counter = (ECC_TYPES["corrected"], ECC_LIFETIMES["volatile"], MEMORY_LOCATIONS["dram"])
        return known + (count if (kind, lifetime, location) == counter else 0)

    watched.box.script(3, _ERRORS, answer)


def _replay_packets(count: int, watched: WatchedBox) -> None:
    watched.box.script_field(5, fields.PCIE_REPLAYS, lambda scope: None if scope else float(count))
