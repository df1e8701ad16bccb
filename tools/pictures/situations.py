"""Four situations of a simulated host: healthy, a run nearly out of memory, a hot GPU, a lost GPU."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from faulty_simulation import FaultySimulation
from history import LEAKING_GPU, Clock, simulated

from gpuwarden.config.schema import Config, ProcessesConfig
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.gpu.snapshot import EventCount
from gpuwarden.health.detector import Detector
from gpuwarden.health.status import box_status
from gpuwarden.history.series import WINDOW_SECONDS
from gpuwarden.host.host_reader import Host
from gpuwarden.state import State

GPUS = 8
LIMIT = 4000.0  # seconds until a situation must have come
LOST_GPU, HOT_GPU, HOTTEST = 5, 4, 93.0
LOST_SECONDS = 45.0  # before the end
NEARLY_OUT = 0.03  # ratio
LEAKING_SECONDS = 200.0  # to an out-of-memory
FALLEN_OFF = 79  # XID
HOST = Host(memory_size=1008 << 30, memory_available=796 << 30, cpus=128)


@dataclass(frozen=True, slots=True)
class Situation:
    """Situation of the simulated host: `steer` is called before each poll, `is_there` says if it is there."""

    name: str
    steer: Callable[[FaultySimulation, float], None]
    is_there: Callable[[State, float], bool]
    leaks: bool = False  # whether one of the runs does


def _cool(simulation: FaultySimulation, _now: float) -> None:
    simulation.gpu(HOT_GPU).hold_temperature(temperature=74.0)


def _heat(simulation: FaultySimulation, now: float) -> None:
    simulation.gpu(HOT_GPU).hold_temperature(temperature=min(78.0 + max(now - WINDOW_SECONDS, 0.0) / 12, HOTTEST))


def _lose(simulation: FaultySimulation, now: float) -> None:
    _cool(simulation, now)
    if now >= WINDOW_SECONDS:
        simulation.gpu(LOST_GPU).lose()


def _least_headroom(state: State) -> float:
    return min((each.share for each in state.pressure.of_runs.values()), default=1.0)


def _seconds_to_oom(state: State) -> float:
    leaks = (leak for run in state.runs for leak in run.leaks.values())
    return min((leak.left.seconds for leak in leaks if leak.left), default=LIMIT)


def _is_well(state: State) -> bool:
    return not box_status(state).troubles


SITUATIONS = (
    Situation("healthy", _cool, lambda state, now: now > WINDOW_SECONDS and _is_well(state)),
    Situation(
        "near-oom", _cool, lambda state, now: now > WINDOW_SECONDS and _least_headroom(state) < NEARLY_OUT, leaks=True
    ),
    Situation("hot", _heat, lambda _state, now: now > WINDOW_SECONDS + 12 * (HOTTEST - 78.0) + LOST_SECONDS),
    Situation("gpu-lost", _lose, lambda _state, now: now > WINDOW_SECONDS + LOST_SECONDS),
)
# For the page of a run: its out-of-memory is forecast, minutes ahead.
LEAKING = Situation("leaking", _cool, lambda state, _now: _seconds_to_oom(state) < LEAKING_SECONDS, leaks=True)
LEAKING_RUN = "unet-segmentation"


class SimulatedBox:
    """Host in a situation, polled by the real `daemon`; to be made while the clock runs."""

    def __init__(self, situation: Situation, clock: Clock) -> None:
        self._situation = situation
        self._clock = clock
        self._simulation = FaultySimulation(GPUS, clock.monotonic)
        if not situation.leaks:
            self._simulation.set_idle(LEAKING_GPU)
        self.daemon = Daemon(Config(processes=ProcessesConfig(series=True)), simulated(self._simulation, clock))

    async def polls(self, step: float) -> AsyncIterator[State]:
        """Poll each `step` seconds until the situation is there; raises RuntimeError if that takes too long."""
        clock = self._clock
        while True:
            self._situation.steer(self._simulation, clock.now)
            state = await self.daemon.poll()
            yield state
            if self._situation.is_there(state, clock.now):
                return
            if clock.now > LIMIT:
                raise RuntimeError(f"{self._situation.name} did not come about in {LIMIT:g} s")
            clock.now += step


def with_xid(state: State, since: float) -> State:
    """Add the XID of a GPU that was lost at that Unix time."""
    fallen = {FALLEN_OFF: EventCount(1, since)}
    gpus = tuple(replace(gpu, xids=fallen) if gpu.fault else gpu for gpu in state.snapshot.gpus)
    seen = replace(state, snapshot=replace(state.snapshot, gpus=gpus))
    return replace(seen, detection=Detector().evaluate(seen, 0.0))
