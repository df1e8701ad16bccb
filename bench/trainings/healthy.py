"""Healthy trainings of many memory shapes: none leaks, and none runs out of memory."""

from __future__ import annotations

import gc
import os
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from training_run import (
    FEATURES,
    Hooks,
    allocate_tensor,
    eager_step,
    fit,
    get_device,
    main,
    make_callback,
    make_dense_model,
    make_steady_stream,
    make_stream,
    make_watch,
    reserve,
)

from gpuwarden.keras import keras
from labels import training
from shared_device import MIB

HELD: list[Any] = []


@training()
def late_optimizer_slots() -> None:
    """Adam's slots appear in the middle, after SGD."""
    reserve()
    model = make_dense_model(4096, features=1024)
    data = make_steady_stream(64, 40, features=1024)
    fit(model, data, epochs=8)
    model.compile(optimizer="adam", loss="mse")
    fit(model, data, epochs=8)


@training()
def retracing() -> None:
    """24 shapes, each traced."""
    reserve()
    model = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(1024, activation="relu")])
    optimizer = keras.optimizers.SGD(0.01)

    @tf.function  # type: ignore[misc,untyped-decorator,unused-ignore]
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    with make_watch("retracing") as run:
        for epoch in run.epochs(24):
            x = tf.ones((200 + 8 * (epoch * 5 % 24), FEATURES))
            for _ in range(50):
                step(x)
                time.sleep(0.006)
                run.step(batch_size=int(x.shape[0]))


@training(pace="default")
def bucketed_lengths() -> None:
    """Batches of five sizes at random."""
    reserve()
    random = np.random.default_rng(3)
    fit(
        make_dense_model(1024, optimizer="adam"),
        make_stream(lambda: iter(random.choice([64, 128, 256, 512, 1024], 60))),
        epochs=20,
    )


@training()
def longer_and_longer() -> None:
    """Batches grow within each epoch."""
    reserve()
    sizes = np.linspace(64, 1024, 60).astype(int)
    fit(make_dense_model(1024), make_stream(lambda: iter(sizes)), epochs=18)


@training()
def sawtooth_over_epochs() -> None:
    """Memory is freed in every fifth epoch."""
    reserve()
    keep = Hooks(on_epoch_end=lambda epoch: HELD.append(allocate_tensor(20)) if epoch % 5 < 4 else HELD.clear())
    fit(make_dense_model(1024), make_steady_stream(256, 40), keep, epochs=32)


@training(pace="default")
def nearly_full() -> None:
    """95 % is in use all the time, in a preallocated pool."""
    reserve()
    HELD.append(allocate_tensor(int(get_device().held()[os.getpid()] / MIB) - 16 - 24))
    fit(make_dense_model(1024), make_steady_stream(256, 60), epochs=16)


@training()
def cache_of_the_first_epoch() -> None:
    """tf.data's cache of 60 MiB fills in the first epoch."""
    reserve()
    fit(make_dense_model(512, features=512), make_steady_stream(256, 120, features=512).cache(), epochs=10)


@training()
def least_recently_used() -> None:
    """A cache has fewer and fewer new entries, and drops the oldest ones when it is full."""
    reserve()
    random = np.random.default_rng(5)
    cache: OrderedDict[int, Any] = OrderedDict()

    def read(_: int) -> None:
        key = int(random.zipf(1.6)) % 400
        if key not in cache:
            cache[key] = allocate_tensor(0.5)
        cache.move_to_end(key)
        if len(cache) > 60:
            cache.popitem(last=False)

    fit(make_dense_model(1024), make_steady_stream(256, 60), Hooks(on_train_batch_end=read), epochs=20)


@training()
def folds_eagerly() -> None:
    """12 models of a cross-validation run eagerly, and each is freed before the next."""
    reserve()
    for _ in range(12):
        model = make_dense_model(1536, features=1024, run_eagerly=True)
        fit(model, make_steady_stream(32, 40, features=1024), epochs=2)
        del model
        keras.backend.clear_session()
        gc.collect()


@training()
def turns() -> None:
    """Fit, evaluate, predict, 12 times."""
    reserve()
    model = make_dense_model(1024, optimizer="adam")
    for _ in range(12):
        fit(model, make_steady_stream(256, 60))
        model.evaluate(make_steady_stream(512, 20), verbose=0, callbacks=[make_callback()])
        model.predict(make_steady_stream(1024, 10).map(lambda x, _: x), verbose=0, callbacks=[make_callback()])


@training()
def warm_up_of_batches() -> None:
    """Batches double through the first third, as planned."""
    reserve()
    model = make_dense_model(2048)
    for size in (32, 64, 128, 256, 512):
        fit(model, make_steady_stream(size, 50))
    fit(model, make_steady_stream(1024, 50), epochs=12)


@training(pace="default")
def own_loop() -> None:
    """A custom loop without epochs, in a pool that grows."""
    weights = tf.Variable(tf.ones((FEATURES, 2048)) / FEATURES)
    with make_watch("own_loop") as run:
        for _ in range(1400):
            eager_step(weights, 256)
            time.sleep(0.006)
            run.step(batch_size=256)


@training()
def shuffling_buffer() -> None:
    """The shuffle buffer of a Python loader fills during the first steps."""
    reserve(0.5)
    buffer: deque[Any] = deque()
    random = np.random.default_rng(2)

    def sizes() -> Iterator[int]:
        for _ in range(1000):
            if len(buffer) < 250:
                buffer.append(np.ones(MIB // 16))
            elif random.random() < 0.5:
                buffer.rotate(1)
                buffer[0] = np.ones(MIB // 16)
            yield 256

    fit(make_dense_model(1024), make_stream(sizes, pause=0.008), epochs=1)


@training()
def garbage_in_cycles() -> None:
    """Arrays stay in reference cycles until the garbage collector runs: host memory as a sawtooth."""
    reserve(0.5)
    gc.disable()

    def litter(batch: int) -> None:
        cycle: list[Any] = [np.ones(MIB // 8)]
        cycle.append(cycle)
        if batch % 100 == 99:
            gc.collect()

    fit(make_dense_model(512), make_steady_stream(128, 300), Hooks(on_train_batch_end=litter), epochs=5)


@training()
def replay_memory() -> None:
    """A replay buffer fills in the first quarter; then each entry replaces the oldest."""
    reserve()
    buffer: deque[Any] = deque(maxlen=300)
    weights = tf.Variable(tf.ones((FEATURES, 1024)) / FEATURES)
    with make_watch("replay_memory") as run:
        for step in range(1300):
            buffer.append(allocate_tensor(0.25) if step < 300 or step % 2 else buffer[0])
            eager_step(weights, 256)
            time.sleep(0.006)
            run.step(batch_size=256)


if __name__ == "__main__":
    main()
