"""Staged leaks of real tensors: `python staged_leaks.py FRAMEWORK CASE ...` prints each census as a line of JSON.

Each case is a process of its own, forked once the framework is imported, which takes seconds. It keeps COUNT tensors of
one shape, and next to them a model's weights, a third of that. The line has the expected holder, and which of its lines
in this file fill it, found by a comment: `# LEAK name`.
"""

# ruff: noqa: ARG002, D102, D103, E402, PERF401, PLC0415 - the leaks are as people write them, each with its framework

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", "TF_ENABLE_ONEDNN_OPTS": "0"}
FRAMEWORK = sys.argv[1]
os.environ["KERAS_BACKEND"] = FRAMEWORK

importlib.import_module(FRAMEWORK)

from gpuwarden.client.census.take_census import take_census

if os.environ.get("STAGED_UNHURRIED"):  # what is found does not depend on how busy the machine is
    take_census.__globals__.update(LISTING_SECONDS=60.0, WALK_SECONDS=60.0, NAMING_SECONDS=60.0)
COUNT = int(os.environ.get("STAGED_COUNT", "500"))
SIDE = int(os.environ.get("STAGED_SIDE", "128"))
SMALL_OBJECTS = int(os.environ.get("STAGED_OBJECTS", "0"))  # lists that the program has, besides


def make_tensor(side: int = SIDE) -> Any:
    if FRAMEWORK == "tensorflow":
        import tensorflow as tf

        return tf.zeros((side, side))
    if FRAMEWORK == "torch":
        import torch

        return torch.zeros(side, side)
    import jax.numpy as jnp

    return jnp.zeros((side, side))


clutter = [[number] for number in range(SMALL_OBJECTS)]
weights: list[Any] = []


@dataclass
class Expected:
    """Holder that the census should name, and the mark of its line; without a mark no line is expected."""

    holder: str
    mark: str = ""
    finish: Callable[[], None] = field(default=lambda: None)


@dataclass
class Census:
    """Census and how long another thread waited at most meanwhile, in seconds."""

    found: Any
    waited: float


def measure() -> Census:
    """Take a census while another thread notes how long it does not run."""
    pauses: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not stop.is_set():
            time.sleep(0.0005)
            now = time.monotonic()
            pauses.append(now - last)
            last = now

    ticker = threading.Thread(target=tick)
    ticker.start()
    time.sleep(0.02)
    pauses.clear()
    found = take_census(7, None)
    stop.set()
    ticker.join()
    return Census(found, max(pauses, default=0.0))


history: list[Any] = []


def module_list() -> tuple[Expected, Census]:
    for _ in range(COUNT):
        history.append(make_tensor())  # LEAK module_list
    return Expected("list `history`", "module_list"), measure()


class Recorder:
    """A trainer's callback that records tensors in a dictionary of lists."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {}

    def on_step(self) -> None:
        self.seen.setdefault("loss", []).append(make_tensor())  # LEAK callback_dict


trainer = SimpleNamespace(callbacks=[Recorder()], steps=0)


def callback_dict() -> tuple[Expected, Census]:
    for _ in range(COUNT):
        trainer.callbacks[0].on_step()
    return Expected("list `trainer.callbacks[0].seen['loss']`", "callback_dict"), measure()


def make_hook() -> Callable[[], None]:
    kept: list[Any] = []

    def hook() -> None:
        kept.append(make_tensor())  # LEAK closure

    return hook


on_step = make_hook()


def closure() -> tuple[Expected, Census]:
    for _ in range(COUNT):
        on_step()
    return Expected("list `kept` of hook()", "closure"), measure()


class Metrics:
    """Metrics by epoch in an attribute, and all losses in an attribute of the class."""

    losses: list[Any] = []  # noqa: RUF012 - that is the leak

    def __init__(self) -> None:
        self.by_step: dict[int, Any] = {}


metrics = Metrics()


def dict_attribute() -> tuple[Expected, Census]:
    for step in range(COUNT):
        metrics.by_step[step] = make_tensor()  # LEAK dict_attribute
    return Expected("dict `metrics.by_step`", "dict_attribute"), measure()


def class_attribute() -> tuple[Expected, Census]:
    for _ in range(COUNT):
        Metrics.losses.append(make_tensor())  # LEAK class_attribute
    return Expected("list `Metrics.losses`", "class_attribute"), measure()


@functools.cache
def encode(_number: int) -> Any:
    return make_tensor()


def lru_cache() -> tuple[Expected, Census]:
    for number in range(COUNT):
        encode(number)
    return Expected("lru_cache of `encode`"), measure()


snapshots: list[Any] = []


def pytrees() -> tuple[Expected, Census]:
    for _ in range(COUNT // 2):
        tree = {"dense": {"kernel": make_tensor(), "bias": make_tensor()}}
        snapshots.append(tree)  # LEAK pytrees
    return Expected("list `snapshots`", "pytrees"), measure()


def local_list() -> tuple[Expected, Census]:
    outputs = []
    for _ in range(COUNT):
        outputs.append(make_tensor())  # LEAK local_list
    return Expected("list `outputs` of local_list()", "local_list"), measure()


def stream() -> Iterator[int]:
    window = []
    for number in range(COUNT + 1):
        window.append(make_tensor())  # LEAK generator
        yield number


batches = stream()


def generator() -> tuple[Expected, Census]:
    for _ in range(COUNT):
        next(batches)
    return Expected("list `window` of stream()", "generator"), measure()


def other_thread() -> tuple[Expected, Census]:
    filled, stop = threading.Event(), threading.Event()

    def prefetch() -> None:
        queue = []
        for _ in range(COUNT):
            queue.append(make_tensor())  # LEAK other_thread
        filled.set()
        stop.wait()

    worker = threading.Thread(target=prefetch, daemon=True)
    worker.start()
    filled.wait()
    return Expected("list `queue` of prefetch()", "other_thread", stop.set), measure()


def keras_callback() -> tuple[Expected, Census]:
    """Leak in a callback without a name; the census is taken in a hook of the fit, as gpuwarden takes it."""
    import keras
    import numpy as np

    taken: list[Census] = []

    class StepRecorder(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen.append(make_tensor())  # LEAK keras_callback

    class CensusAtEnd(keras.callbacks.Callback):  # type: ignore[misc] # likewise
        def on_train_end(self, logs: Any = None) -> None:
            taken.append(measure())

    model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    data = np.zeros((COUNT, 4), "float32")
    model.fit(data, data[:, :1], batch_size=1, verbose=0, callbacks=[StepRecorder(), CensusAtEnd()])
    return Expected("list `StepRecorder.seen`", "keras_callback"), taken[0]


loss_history: list[Any] = []


def losses_with_graphs() -> tuple[Expected, Census]:
    """Losses kept with what the framework saved to compute their gradients; elsewhere with their pullbacks."""
    for _ in range(COUNT):
        loss_history.append(make_loss())  # LEAK losses_with_graphs
    return Expected("list `loss_history`", "losses_with_graphs"), measure()


def make_loss() -> Any:
    if FRAMEWORK == "torch":
        weight = make_tensor().requires_grad_()
        return (weight * 2).relu().exp().mean()
    if FRAMEWORK == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape(persistent=True) as tape:
            weight = make_tensor()
            tape.watch(weight)
            loss = tf.reduce_mean(weight * 2)
        return loss, tape, weight
    import jax

    return jax.vjp(lambda weight: (weight * 2).mean(), make_tensor()), make_tensor()


CASES = (
    module_list,
    callback_dict,
    closure,
    dict_attribute,
    class_attribute,
    lru_cache,
    pytrees,
    local_list,
    generator,
    other_thread,
    keras_callback,
    losses_with_graphs,
)


def find_line(mark: str) -> int | None:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next((number for number, line in enumerate(lines, 1) if mark and line.endswith(f"# LEAK {mark}")), None)


def main(case: str) -> None:
    weights.extend(make_tensor() for _ in range(COUNT // 3))
    expected, census = next(each for each in CASES if each.__name__ == case)()
    groups = [
        {name: getattr(group, name) for name in ("count", "bytes", "shape", "dtype", "holder", "place")}
        for group in census.found.groups
    ]
    line = {
        "holder": expected.holder,
        "line": find_line(expected.mark),
        "groups": groups,
        "bytes": census.found.tensor_bytes,
        "seconds": census.found.seconds,
        "waited": census.waited,
        "was_cut": census.found.is_cut,
    }
    sys.stdout.write(json.dumps(line) + "\n")
    expected.finish()


if __name__ == "__main__":
    for name in sys.argv[2:]:
        if child := os.fork():
            if os.waitpid(child, 0)[1]:
                sys.exit(f"{name} failed")
        else:
            main(name)
            sys.stdout.flush()
            os._exit(0)  # what the framework tidies up takes seconds
