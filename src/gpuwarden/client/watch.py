"""Watch of a loop that people write themselves: `with watch("name") as run:`, and `run.step()` after each step.

It needs no framework, and the loop never suffers from it: nothing here waits, raises, or asks a device for anything but
its allocator's counters.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Generic, TypeVar

from gpuwarden.client.frameworks import FRAMEWORK_NAMES
from gpuwarden.client.loop_tracker import LoopTracker
from gpuwarden.client.reporter import REPORT_INTERVAL_SECONDS
from gpuwarden.client.settings import check_settings
from gpuwarden.protocol.messages import Advice, Level, Phase

T = TypeVar("T")


def watch(
    name: str | None = None,
    *,
    devices: Mapping[str, str] | None = None,
    socket: str | os.PathLike[str] | None = None,
    interval: float = REPORT_INTERVAL_SECONDS,
    framework: str | None = None,
    disabled: bool | None = None,
) -> Watch:
    """Report this process's loop to the gpuwarden daemon; without a daemon it does nothing.

    `name` says what the run is called, by default its script. `devices` says which GPU, by UUID, a framework's device
    stands for, where the daemon cannot know: `{"GPU:0": "GPU-..."}`. `socket` is the daemon's, by default
    GPUWARDEN_SOCKET's or /run/gpuwarden/run.sock. `interval` is the seconds between reports. `framework`, "torch",
    "jax" or "tensorflow", says which one computes where the process uses several. `disabled`, or GPUWARDEN_DISABLED=1,
    switches it off. Raises ValueError or TypeError for a wrong argument, and nothing of its own ever after.
    """
    settings = check_settings(name=name, devices=devices, socket=socket, interval=interval, disabled=disabled)
    if framework not in (None, *FRAMEWORK_NAMES):
        raise ValueError(f"framework: want one of {', '.join(FRAMEWORK_NAMES)}, not {framework!r}")
    return Watch(LoopTracker(settings, framework))


class Watch:
    """One loop of this process; `watch()` makes one. To be used by one thread at a time: another has its own.

    All watches of a process, and its Keras callbacks, are one run, whose totals go on until the process ends. A copy
    does nothing, nor does a forked child's: a child that trains makes its own.
    """

    def __init__(self, loop: LoopTracker) -> None:
        self._loop = loop

    def step(self, batch_size: int | None = None, loss: float | None = None) -> None:
        """Record that a step has ended, in about 2 µs but a few times a second; it never waits and never raises.

        `batch_size` is how many examples went through it. `loss` is a number of the host's: a tensor is left out, since
        to read it would wait for the device.
        """
        self._loop.step(batch_size, loss)

    def epoch(self, number: int) -> None:
        """Record that epoch `number`, from 0, begins: what went before it since the last step is no part of a step."""
        self._loop.begin_epoch(number)

    def epochs(self, epochs: int | Iterable[int]) -> Iterator[int]:
        """Go through so many epochs, or these: `for epoch in run.epochs(10)`, `run.epochs(range(5, 10))`."""
        for number in epochs if isinstance(epochs, Iterable) else range(epochs):
            self._loop.begin_epoch(number)
            yield number
        self._loop.rest()

    def batches(self, loader: Iterable[T]) -> TimedBatches[T]:
        """Go through a loader's batches, and note how long the loop waits for each; the loader does as ever."""
        return TimedBatches(self, self._loop, loader)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Stay in another phase for a while, "test", "predict" or "idle": its time is no step time.

        `with run.phase("test"): ...`. Steps within are not counted.
        """
        self._loop.enter(name)
        try:
            yield
        except BaseException:
            self._loop.leave(failed=True)
            raise
        self._loop.leave(failed=False)

    @property
    def pressure(self) -> Level:
        """Pressure on this process's GPUs now: "none", "warning" or "critical"; "none" if no daemon is connected.

        As of now, or 50 ms before; it never waits.
        """
        return self._loop.advice.pressure

    @property
    def advice(self) -> Advice | None:
        """Last advice to this process, perhaps on what is over by now; None where there was none."""
        return self._loop.advice.last

    def close(self) -> None:
        """End the loop: report the last totals. The run itself ends with the process."""
        self._loop.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(watch, disabled=True), ()

    def __del__(self) -> None:
        # At any moment, in any thread: so what is left is counted with the next look of another loop, or at the end.
        self._loop.switch_off()

    def __enter__(self) -> Watch:  # noqa: PYI034 - Self is there from Python 3.11 on
        return self

    def __exit__(
        self, _cls: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._loop.fail(error)
        self._loop.close()


class TimedBatches(Generic[T]):
    """A loader's batches as the loader gives them; each pass through it is timed."""

    def __init__(self, watch: Watch, loop: LoopTracker, loader: Iterable[T]) -> None:
        self._watch = watch  # which lives as long as this
        self._loop = loop
        self._loader = loader

    def __iter__(self) -> Iterator[T]:
        self._loop.begin_batches()
        asked = monotonic()
        return self._pass(iter(self._loader), asked)  # a loader that starts workers does it in iter()

    def _pass(self, iterator: Iterator[T], asked: float) -> Iterator[T]:
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                self._loop.rest()
                return
            self._loop.record_wait(asked)
            yield batch
            del batch  # else it would stay in memory while the next is made
            asked = monotonic()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type] # raises TypeError as the loader does
