"""Common parts of the situations' programs: small models, data, and the truth about the allocator.

The harness (bench/situations.py) sets the environment in which TensorFlow uses its real BFC allocator for the CPU. A
program prints its events as lines of JSON: when training starts, when it ends, and what was in use.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gpuwarden import watch
from gpuwarden.keras import GpuWarden, keras
from shared_device import MIB, UUID, SharedDevice

CPU = {"CPU:0": UUID}
INTERVAL = float(os.environ.get("SITUATION_INTERVAL", "0.25"))
LONGER = int(os.environ.get("SITUATION_LONGER", "1"))  # as many times the steps, for as much more room
DEVICE = SharedDevice(Path(os.environ["SHARED_DEVICE"]))
FEATURES = 64
SAMPLE_SECONDS = 0.05
TENTHS = 10
SPARE = 2 * MIB  # for what TensorFlow keeps on the host, which is the same allocator here
_growing = threading.Event()  # set as it begins to lose
STILL_SECONDS, STILL_CPU = 9.0, 0.002  # the main thread waits for the allocator, which asks again for ten seconds


def callback() -> GpuWarden:
    """Make the callback that reports here."""
    return GpuWarden(devices=CPU, interval=INTERVAL)


def watched(name: str) -> Any:
    """Make a watch() that reports here."""
    return watch(name, devices=CPU, interval=INTERVAL, framework="tensorflow")


def memory() -> dict[str, int]:
    """Return the allocator's bytes in use, now and at most."""
    return dict(tf.config.experimental.get_memory_info("CPU:0"))


def say(event: str, **facts: Any) -> None:
    """Print an event, with the figures of the allocator and the device."""
    if event == "growing":
        _growing.set()
    now = memory()
    reported = {
        "event": event,
        "at": time.time(),
        "current": now["current"],
        "peak": now["peak"],
        "held": DEVICE.held().get(os.getpid(), 0),
        "free": DEVICE.free,
    }
    print(json.dumps(reported | facts), flush=True)


def reserve(share: float = 0.97) -> None:
    """Let the allocator reserve nearly all free memory of the device in one region, like TensorFlow on a GPU.

    On a CPU it always grows by regions. One tensor that large, once freed, leaves one region for all that follows.
    """
    tf.zeros((256,))  # the first tensor makes the process a holder, with its context
    while share > 0.3:
        limit = int(os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB", "65536")) * MIB
        size = int(min(DEVICE.free, limit) * share) // MIB * MIB
        try:
            tf.zeros((size // 4,))
            break
        except tf.errors.ResourceExhaustedError:  # the allocator tries in steps of a tenth
            share -= 0.05
    tf.config.experimental.reset_memory_stats("CPU:0")


def preallocate() -> None:
    """Reserve once, like TensorFlow's pool for a GPU, which grows only on request.

    Up to its own limit it may still grow, and the daemon takes that into account.
    """
    reserve()
    if "TF_CPU_BFC_MEM_LIMIT_IN_MB" not in os.environ:
        DEVICE.fill(spare=SPARE)


def dense(width: int, *, depth: int = 1, features: int = FEATURES, optimizer: Any = "sgd", **compiling: Any) -> Any:
    """Make a model with wide activations and narrow input: much memory for little computing."""
    layers = [keras.layers.Input((features,))]
    layers += [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
    made = keras.Sequential([*layers, keras.layers.Dense(1)])
    made.compile(optimizer=optimizer, loss="mse", **compiling)
    return made


def stream(sizes: Callable[[], Iterator[int]], *, features: int = FEATURES, pause: float = 0.004) -> Any:
    """Yield batches of these sizes, each after a pause as if it had been read; only computing needs memory."""

    def batches() -> Iterator[tuple[Any, Any]]:
        for size in sizes():
            time.sleep(pause)
            yield np.full((size, features), 0.1, "float32"), np.zeros((size, 1), "float32")

    specs = tf.TensorSpec((None, features)), tf.TensorSpec((None, 1))
    return tf.data.Dataset.from_generator(batches, output_signature=specs)


def steady(size: int, steps: int, **settings: Any) -> Any:
    """Yield batches of the same size."""
    return stream(lambda: iter([size] * steps), **settings)


def fit(model: Any, data: Any, *callbacks: Any, epochs: int = 1, **settings: Any) -> Any:
    """Fit quietly, reporting."""
    return model.fit(data, epochs=epochs, verbose=0, callbacks=[callback(), *callbacks], **settings)


class Each(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Callback of functions, by the names of hooks."""

    def __init__(self, **hooks: Callable[[int], Any]) -> None:
        super().__init__()
        for name, act in hooks.items():
            setattr(self, name, self._calling(act))

    @staticmethod
    def _calling(act: Callable[[int], Any]) -> Callable[..., None]:
        def hook(*given: Any, **_: Any) -> None:
            act(given[0] if given and isinstance(given[0], int) else 0)

        return hook


class Pace:
    """Pace by the clock: each `wait` ends at the next multiple of `period` seconds since the first one.

    The time of computing in between is absorbed. A late call returns at once, and a multiple that has passed meanwhile
    is lost, not made up for.
    """

    kept: Pace | None = None  # the last that was made: a program's own

    def __init__(self, period: float) -> None:
        self._period = period
        self.last = 0.0  # when the last wait ended, in Unix time
        self._began = self._left = 0.0
        self._multiple = self._waits = 0
        self._busy = 0.0
        Pace.kept = self

    def wait(self) -> None:
        """Sleep until the next multiple."""
        now = time.monotonic()
        if not self._waits:
            self._began = self._left = now
        self._waits += 1
        self._busy += now - self._left
        self._multiple = max(self._multiple + 1, int((now - self._began) / self._period))
        time.sleep(max(self._began + self._multiple * self._period - now, 0.0))
        self.last, self._left = time.time(), time.monotonic()

    def reported(self) -> dict[str, float]:
        """Return how the pace was kept: waits, lost multiples, and the share of the time not slept."""
        busy = self._busy / (self._multiple * self._period or 1)
        return {"waits": self._waits, "lost": self._multiple - self._waits, "busy": round(busy, 3)}


class Witness(threading.Thread):
    """Reader of the allocator and the host's memory, to compare a label with what happened.

    `refused` is the Unix time when memory was full: when the main thread, while allocating, first stalled. None before.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[int, int]] = []
        self.refused: float | None = None

    def run(self) -> None:
        """Read until the end."""
        page = os.sysconf("SC_PAGESIZE")
        ident = threading.main_thread().ident
        assert ident is not None
        clock = time.pthread_getcpuclockid(ident)
        used, moved = 0.0, time.time()
        while True:
            resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * page
            self.seen.append((memory()["current"], resident))
            now, uses = time.time(), time.clock_gettime(clock)
            if uses - used > STILL_CPU or not _growing.is_set():
                used, moved = uses, now
            elif self.refused is None and now - moved > STILL_SECONDS:
                self.refused = moved
            time.sleep(SAMPLE_SECONDS)

    def tenths(self) -> dict[str, list[int]]:
        """Return MiB by tenths of the time: lowest and highest in use on the device, highest on the host."""
        parts = [part for part in np.array_split(np.array(self.seen) / MIB, TENTHS) if len(part)]
        return {
            "lowest": [int(part[:, 0].min()) for part in parts],
            "highest": [int(part[:, 0].max()) for part in parts],
            "host": [int(part[:, 1].max()) for part in parts],
        }


def requested(text: str) -> int | None:
    """Parse the requested bytes from an out-of-memory error's message."""
    found = re.findall(r"OOM when allocating tensor with shape\[([\d,]*)\] and type (\w+)", text)
    if not found:
        return None
    shape, kind = found[-1]
    size = {"double": 8, "float": 4, "int64": 8, "half": 2, "uint8": 1, "bool": 1}.get(kind, 4)
    return int(np.prod([int(each) for each in shape.split(",") if each], dtype=np.int64)) * size


def play(situations: dict[str, Callable[..., None]]) -> None:
    """Play the situation that the first argument names; with `--without`, without its cause.

    An out-of-memory error is printed and raised again.
    """
    name, without = sys.argv[1], "--without" in sys.argv[2:]
    say("begin")
    witness = Witness()
    witness.start()
    try:
        situation = situations[name]
        situation(**({"cause": not without} if "cause" in signature(situation).parameters else {}))
    except (tf.errors.OpError, MemoryError) as error:
        text = str(error)
        facts = {"exception": type(error).__name__, "requested": requested(text), "text": text[-400:]}
        # Who keeps a pace, and never stood still for long, was in the step after the last wait.
        refused = witness.refused or (Pace.kept.last if Pace.kept else None)
        say("oom", **facts, refused=refused, **witness.tenths(), **_pace())
        sys.stdout.flush()
        if os.environ.get("SITUATION_DIES"):
            os._exit(1)
        raise
    say("end", **witness.tenths(), **_pace())


def _pace() -> dict[str, Any]:
    return {"pace": Pace.kept.reported()} if Pace.kept else {}
