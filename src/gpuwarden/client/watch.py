"""Watch of a custom training loop: `with watch("name") as run:`, and `run.step()` after each step.

It needs no framework and never disturbs the loop: nothing here waits, raises, or reads more of a device than its
allocator's counters.
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
from gpuwarden.client.guard import claim_steps
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
    census: bool | None = None,
    summary: bool | None = None,
) -> Watch:
    """Report a custom training loop to the gpuwarden daemon.

    For loops in torch, JAX, TensorFlow's GradientTape or plain Python; for Keras's `fit` there is the callback
    `gpuwarden.keras.GpuWarden`. Without a daemon it does nothing; a daemon that starts later is found within 30 s.

        from gpuwarden import watch

        with watch("my training") as run:
            for epoch in run.epochs(10):
                for batch in run.batches(loader):
                    train(batch)
                    run.step(batch_size=len(batch))

    Args:
        name: Name of the run. Default: the name of the script.
        devices: UUID of the GPU behind a framework's device, for devices that the daemon cannot identify:
            `{"GPU:0": "GPU-..."}`.
        socket: Path of the daemon's socket. Default: `$GPUWARDEN_SOCKET`, else /run/gpuwarden/run.sock.
        interval: Seconds between reports, 0 to 86400. Default: 0.25.
        framework: "torch", "jax" or "tensorflow": the one that computes, if the process has set up several. Default:
            the one that is found.
        disabled: True to report nothing. Default: True if `$GPUWARDEN_DISABLED` is 1.
        census: True to report which names of the program keep its tensors, at a leak, under memory pressure or after an
            out-of-memory: at most once a minute, within 0.3 s. Default: True if `$GPUWARDEN_CENSUS` is 1.
        summary: True to print a line about memory, headroom and lost time to standard error when the loop ends, or the
            diagnosis of an out-of-memory below its traceback. It delays the end by up to 0.3 s. Default:
            `$GPUWARDEN_SUMMARY`, else True on a terminal.

    Cost: 3 to 6 µs of CPU time a step on average, at steps of 1 ms; about 100 µs for a report.

    It never blocks the loop, never sets up or synchronizes a device, and never raises after this call.

    Raises:
        ValueError or TypeError: An argument is wrong; the message begins with its name.
    """
    settings = check_settings(
        name=name, devices=devices, socket=socket, interval=interval, disabled=disabled, census=census, summary=summary
    )
    if framework not in (None, *FRAMEWORK_NAMES):
        raise ValueError(f"framework: {framework!r} is unknown; pass one of {', '.join(FRAMEWORK_NAMES)}")
    claim_steps()
    return Watch(LoopTracker(settings, framework))


class Watch:
    """One training loop of this process, made by `watch()`. Use it in one thread; each thread makes its own.

    All watches and Keras callbacks of a process are one run, whose totals last until the process ends. A copy does
    nothing, and neither does a watch in a forked child: a child that trains makes its own.
    """

    def __init__(self, loop: LoopTracker) -> None:
        self._loop = loop

    def step(self, batch_size: int | None = None, loss: float | None = None) -> None:
        """Record that a training step has ended; call it once after each step.

        Takes about 2 µs, and about 100 µs four times a second, when it reports. Never waits and never raises.

        Args:
            batch_size: Number of examples in the step.
            loss: Loss as a Python or NumPy number, such as `loss.item()`. A tensor is ignored with one warning: reading
                it would wait for the device.
        """
        self._loop.step(batch_size, loss)

    def epoch(self, number: int) -> None:
        """Record that epoch `number` starts, counted from 0. The time since the last step belongs to no step."""
        self._loop.begin_epoch(number)

    def epochs(self, epochs: int | Iterable[int]) -> Iterator[int]:
        """Yield epoch numbers and record each epoch: `for epoch in run.epochs(10)`, `run.epochs(range(5, 10))`."""
        for number in epochs if isinstance(epochs, Iterable) else range(epochs):
            self._loop.begin_epoch(number)
            yield number
        self._loop.rest()

    def batches(self, loader: Iterable[T]) -> TimedBatches[T]:
        """Return an iterable of the loader's batches that measures how long the loop waits for each.

        It has the loader's length, raises what the loader raises, and keeps no batch.
        """
        return TimedBatches(self, self._loop, loader)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Switch to the phase "test", "predict" or "idle" inside a `with` block: `with run.phase("test"): ...`.

        Its time belongs to no step, and steps inside it are not counted.
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
        """Current pressure on this process's GPUs: "none", "warning" or "critical"; "none" without a daemon.

        At most 50 ms old; reading it never waits.
        """
        return self._loop.advice.pressure

    @property
    def advice(self) -> Advice | None:
        """Last advice that the daemon sent to this process, which may be outdated; None if there was none."""
        return self._loop.advice.last

    def close(self) -> None:
        """Report the last totals and stop; `with` does it. The run itself ends with the process."""
        self._loop.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(watch, disabled=True), ()

    def __del__(self) -> None:
        # Runs at any moment, in any thread, so the remaining steps are counted by another loop, or at the end.
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
    """Iterable of a loader's batches that measures the wait for each."""

    def __init__(self, watch: Watch, loop: LoopTracker, loader: Iterable[T]) -> None:
        self._watch = watch  # keeps it alive
        self._loop = loop
        self._loader = loader

    def __iter__(self) -> Iterator[T]:
        self._loop.begin_batches()
        requested_at = monotonic()
        return self._pass(iter(self._loader), requested_at)  # a loader that starts workers does it in iter()

    def _pass(self, iterator: Iterator[T], requested_at: float) -> Iterator[T]:
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                self._loop.rest()
                return
            self._loop.record_wait(requested_at)
            yield batch
            del batch  # otherwise it would stay in memory while the next is made
            requested_at = monotonic()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type] # raises TypeError as the loader does
