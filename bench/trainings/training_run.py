"""Parts that the trainings share: memory at start, small models, data, and events printed as lines of JSON.

The harness (bench/accuracy.py) sets the environment in which TensorFlow uses its real BFC allocator for the CPU.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gpuwarden import watch
from gpuwarden.keras import GpuWarden, keras
from labels import TRAININGS
from shared_device import MIB, UUID, SharedDevice

layers = keras.layers

FEATURES = 64
_CPU = {"CPU:0": UUID}
_INTERVAL = float(os.environ.get("TRAINING_INTERVAL", "0.25"))
_SPARE = 2 * MIB  # for what TensorFlow keeps on the host, which is the same allocator here
_SAMPLE_SECONDS = 0.05
_STALL_SECONDS, _STALL_CPU_SECONDS = 9.0, 0.002  # the main thread waits for the allocator, which retries for ten
_growing = threading.Event()  # set when the training begins to leak


@cache
def get_device() -> SharedDevice:
    """Return the device of this process."""
    return SharedDevice(Path(os.environ["SHARED_DEVICE"]))


def make_callback() -> GpuWarden:
    """Make the callback, which reports to the harness's daemon."""
    return GpuWarden(devices=_CPU, interval=_INTERVAL)


def make_watch(name: str) -> Any:
    """Make a watch() that reports to the harness's daemon."""
    return watch(name, devices=_CPU, interval=_INTERVAL, framework="tensorflow")


def read_memory() -> dict[str, int]:
    """Return the allocator's bytes in use, now and at most."""
    return dict(tf.config.experimental.get_memory_info("CPU:0"))


def print_event(event: str, **facts: Any) -> None:
    """Print an event with the figures of the allocator and the device."""
    if event == "growing":
        _growing.set()
    now = read_memory()
    figures = {"current": now["current"], "peak": now["peak"], "free": get_device().free}
    figures["held"] = get_device().held().get(os.getpid(), 0)
    print(json.dumps({"event": event, "at": time.time(), **figures, **facts}), flush=True)


@cache
def print_growing() -> None:
    """Print, once, that the training begins to leak."""
    print_event("growing")


def reserve(share: float = 0.97) -> None:
    """Let the allocator reserve nearly all free memory of the device in one region, like TensorFlow on a GPU.

    On a CPU it always grows by regions. One tensor that large, once freed, leaves one region for all that follows.
    """
    tf.zeros((256,))  # the first tensor makes the process a holder, with its context
    while share > 0.3:
        limit = int(os.environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB", "65536")) * MIB
        size = int(min(get_device().free, limit) * share) // MIB * MIB
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
        get_device().fill(spare=_SPARE)


def allocate_tensor(mebibytes: float) -> Any:
    """Allocate a tensor on the device."""
    return tf.zeros((int(mebibytes * MIB) // 4,))


def compile_model(*stack: Any, **compiling: Any) -> Any:
    """Make a model of these layers."""
    model = keras.Sequential(stack)
    model.compile(**{"optimizer": "adam", "loss": "mse"} | compiling)
    return model


def make_dense_model(
    width: int, *, depth: int = 1, features: int = FEATURES, optimizer: Any = "sgd", **compiling: Any
) -> Any:
    """Make a model with wide activations and narrow input: much memory for little computing."""
    stack = [layers.Dense(width, activation="relu") for _ in range(depth)]
    return compile_model(layers.Input((features,)), *stack, layers.Dense(1), optimizer=optimizer, **compiling)


def make_tower(width: int, depth: int) -> Any:
    """Make an uncompiled model of layers with width x width weights: 16 MiB each at 2048."""
    stack = [layers.Dense(width, activation="relu", kernel_initializer="zeros") for _ in range(depth)]
    return keras.Sequential([layers.Input((FEATURES,)), *stack, layers.Dense(1)])


def make_stream(sizes: Callable[[], Iterator[int]], *, features: int = FEATURES, pause: float = 0.004) -> Any:
    """Yield batches of these sizes, each after a pause as if it had been read; only computing needs memory."""

    def batches() -> Iterator[tuple[Any, Any]]:
        for size in sizes():
            time.sleep(pause)
            yield np.full((size, features), 0.1, "float32"), np.zeros((size, 1), "float32")

    specs = tf.TensorSpec((None, features)), tf.TensorSpec((None, 1))
    return tf.data.Dataset.from_generator(batches, output_signature=specs)


def make_steady_stream(size: int, steps: int, **settings: Any) -> Any:
    """Yield batches of the same size."""
    return make_stream(lambda: iter([size] * steps), **settings)


def make_repeated_batches(steps: int, x: tuple[int, ...], y: tuple[int, ...], *, pause: float = 0.004) -> Any:
    """Yield batches of these shapes."""

    def batches() -> Iterator[tuple[Any, Any]]:
        for _ in range(steps):
            time.sleep(pause)
            yield np.full(x, 0.5, "float32"), np.zeros(y, "float32")

    return tf.data.Dataset.from_generator(batches, output_signature=(tf.TensorSpec(x), tf.TensorSpec(y)))


def fit(model: Any, data: Any, *callbacks: Any, epochs: int = 1, **settings: Any) -> Any:
    """Fit quietly, with the callback."""
    return model.fit(data, epochs=epochs, verbose=0, callbacks=[make_callback(), *callbacks], **settings)


def compiled_step(model: Any, optimizer: Any, loss: Callable[..., Any]) -> Any:
    """Make the step of a custom loop, as one graph."""

    @tf.function(reduce_retracing=True)  # type: ignore[misc,untyped-decorator,unused-ignore]
    def step(*given: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(*given)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))
        return value

    return step


def eager_step(weights: Any, size: int) -> None:
    """Make an eager step of one layer."""
    x = tf.ones((size, FEATURES))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.nn.relu(x @ weights)))
    weights.assign_sub(0.01 * tape.gradient(loss, weights))


def eager_steps(run: Any, seconds: float, size: int = 256) -> None:
    """Make eager steps for so long."""
    weights = tf.Variable(tf.ones((FEATURES, 1024)) / FEATURES)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        eager_step(weights, size)
        run.step(batch_size=size)
        time.sleep(0.005)


def custom_loop(run: Any, model: Any, optimizer: Any, steps: int, *, size: int = 64) -> None:
    """Train a model in a loop without Keras's fit."""
    x = tf.ones((size, FEATURES))
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        time.sleep(0.01)
        run.step(batch_size=size)


class Hooks(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Callback made of functions, by the names of hooks."""

    def __init__(self, **hooks: Callable[[int], Any]) -> None:
        super().__init__()
        for name, act in hooks.items():
            setattr(self, name, self._hook(act))

    @staticmethod
    def _hook(act: Callable[[int], Any]) -> Callable[..., None]:
        def hook(*given: Any, **_: Any) -> None:
            act(given[0] if given and isinstance(given[0], int) else 0)

        return hook


class Pace:
    """Pace by the clock: each `wait` ends at the next multiple of `period` seconds since the first one.

    The time of computing in between is absorbed. A late call returns at once, and a multiple that has passed meanwhile
    is lost, not made up for.
    """

    last_wait: float | None = None  # Unix time when the last wait of this process ended

    def __init__(self, period: float) -> None:
        self._period = period
        self._began: float | None = None
        self._multiple = 0

    def wait(self) -> None:
        """Sleep until the next multiple."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        self._multiple = max(self._multiple + 1, int((now - self._began) / self._period))
        time.sleep(max(self._began + self._multiple * self._period - now, 0.0))
        Pace.last_wait = time.time()


class MemorySampler(threading.Thread):
    """Sampler of the bytes in use, which also notices when memory is full.

    `refused` is the Unix time when the main thread, while allocating, first stalled; None before.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[int] = []
        self.refused: float | None = None

    def run(self) -> None:
        """Sample until the end."""
        ident = threading.main_thread().ident
        assert ident is not None
        clock = time.pthread_getcpuclockid(ident)
        used, moved = 0.0, time.time()
        while True:
            self.samples.append(read_memory()["current"])
            now, uses = time.time(), time.clock_gettime(clock)
            if uses - used > _STALL_CPU_SECONDS or not _growing.is_set():
                used, moved = uses, now
            elif self.refused is None and now - moved > _STALL_SECONDS:
                self.refused = moved
            time.sleep(_SAMPLE_SECONDS)

    def lowest(self) -> list[int]:
        """Return the lowest MiB in use in each tenth of the time."""
        return [int(part.min()) for part in np.array_split(np.array(self.samples) / MIB, 10) if len(part)]


def parse_requested_bytes(text: str) -> int | None:
    """Parse the requested bytes from an out-of-memory error's message."""
    found = re.findall(r"OOM when allocating tensor with shape\[([\d,]*)\] and type (\w+)", text)
    if not found:
        return None
    shape, kind = found[-1]
    size = {"double": 8, "float": 4, "int64": 8, "half": 2, "uint8": 1, "bool": 1}.get(kind, 4)
    return int(np.prod([int(each) for each in shape.split(",") if each], dtype=np.int64)) * size


def main() -> None:
    """Run the training that the first argument names; with `--without`, without its cause.

    An out-of-memory error is printed and raised again.
    """
    training = TRAININGS[sys.argv[1]]
    print_event("begin")
    sampler = MemorySampler()
    sampler.start()
    try:
        training.start(cause="--without" not in sys.argv[2:])
    except (tf.errors.OpError, MemoryError) as error:
        text = str(error)
        refused = sampler.refused or Pace.last_wait  # one that is paced was in the step after its last wait
        print_event("oom", requested=parse_requested_bytes(text), refused=refused, text=text[-400:])
        sys.stdout.flush()
        if training.exits_at_once:
            os._exit(1)
        raise
    print_event("end", lowest=sampler.lowest())
