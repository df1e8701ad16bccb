"""Scenes on a simulated host: its processes and events; incidents are scenes with the alerts that they should fire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from board import NO_LOAD, Load
from history import BEGIN, Clock
from jobs import FEEDING, FINISHED, Act, Ending, Job
from scripted_box import ScriptedBox, WatchedBox
from scripted_gpus import CONTEXT, GIB, SIZE

from gpuwarden.config.schema import Config
from gpuwarden.protocol.messages import Phase

HOUR = 3600.0
DURATION_SECONDS = 2400.0  # of most scenes
WELL = 900.0  # seconds for which all is well before something happens
BUSY = Load(utilization=0.95, bandwidth=0.5, intensity=0.75)
NEARLY_ALL = int(0.97 * SIZE) - CONTEXT  # the pool of a framework that takes the device's memory at start

Event = Callable[[WatchedBox], object]


@dataclass(frozen=True, slots=True)
class Scene:
    """Scene of `seconds` with `events` at some times. Its subject starts at `begin`; alerts count from `first` on."""

    seconds: float
    jobs: Sequence[Job] = ()
    events: Sequence[tuple[float, Event]] = ()
    begin: float = WELL
    gpus: int = 2
    config: Config | None = None
    first: float = 0.0


@dataclass(frozen=True, slots=True)
class Incident:
    """Incident: what happens, its scene, and the alerts that it should fire, of any severity.

    The alerts were written down before any rule was run on them, and are those that a person who knows the host would
    want. Inhibition in Alertmanager does not count: an alert that another one hides must still fire.
    """

    name: str
    happens: str
    scene: Callable[[], Scene]
    fires: frozenset[str]


def incident(name: str, happens: str, scene: Callable[[], Scene], *fires: str) -> Incident:
    """Return an incident that should fire these alerts."""
    return Incident(name, happens, scene, frozenset(fires))


async def scrape_scene(
    scene: Scene, clock: Clock, step: float, names: frozenset[str]
) -> AsyncIterator[tuple[float, str | None]]:
    """Run a scene; yield the Unix time of each scrape and the families of these names, None without an answer."""
    clock.now = scene.first
    box = ScriptedBox(scene.jobs, scene.gpus, clock)
    watched = WatchedBox(box, clock, scene.config)
    events = sorted(scene.events, key=lambda each: each[0], reverse=True)
    while clock.now <= scene.seconds:
        while events and events[-1][0] <= clock.now:
            events.pop()[1](watched)
        yield BEGIN + clock.now, await watched.page(names)
        clock.now += step


def make_training(
    seconds: float,
    *,
    begin: float = 0.0,
    gpus: tuple[int, ...] = (0,),
    name: str = "resnet50",
    load: Load = BUSY,
    memory: tuple[float, float] = (38.0, 38.0),
    peak: float = 2.0,
    pool: int | None = NEARLY_ALL,
    uid: int = 1000,
    then: Sequence[Act] = (),
    ending: Ending = FINISHED,
) -> Job:
    """Return a usual run: imports, data, a compilation, and steps for that long; memory in GiB. More acts follow."""
    low, high = (each * GIB for each in memory)
    acts = [*make_start(low), make_steps(seconds - START, load, (low, high), peak * GIB), *then]
    return Job(begin, acts, gpus, name, uid=uid, pool=pool, ending=ending)


START = 60.0  # seconds of a run before its first step


def make_start(memory: float) -> Iterator[Act]:
    """Return the acts of a run before its first step."""
    yield Act(10, NO_LOAD)
    yield Act(30, FEEDING, memory=(memory / 2, memory))
    yield Act(20, Load(0.28, 0.1, 0.4), "train")


def make_steps(
    seconds: float,
    load: Load = BUSY,
    memory: tuple[float, float] | None = None,
    peak: float = 0.0,
    *,
    step: float = 0.3,
    waits: float | None = 0.03,
    epoch: int = 0,
    phase: Phase = "train",
    batch: int | None = 64,
) -> Act:
    """Return training in steps, memory in bytes."""
    return Act(seconds, load, phase, memory, peak, step, waits, epoch=epoch, batch=batch)


def schedule(seconds: float, event: Event) -> tuple[float, Event]:
    """Let something happen after so many seconds."""
    return seconds, event
