"""Healthy trainings of many memory shapes: `python healthy.py NAME`; none leaks."""

# ruff: noqa: D401 - the docstrings say what happens

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gpuwarden.keras import keras
from shared_device import MIB
from training import (
    DEVICE,
    FEATURES,
    Each,
    callback,
    dense,
    fit,
    play,
    reserve,
    steady,
    stream,
    watched,
)

HELD: list[Any] = []


def tensor(mebibytes: float) -> Any:
    """Allocate a tensor on the device."""
    return tf.zeros((int(mebibytes * MIB) // 4,))


def one_time_steps() -> None:
    """Allocate something large and keep it, twice."""
    reserve()
    jumps = Each(on_epoch_begin=lambda epoch: HELD.append(tensor(30)) if epoch in (5, 11) else None)
    fit(dense(1024), steady(256, 50), jumps, epochs=20)


def late_optimizer_slots() -> None:
    """Train with SGD first, then with Adam, whose slots appear with its first step."""
    reserve()
    model = dense(4096, features=1024)
    data = steady(64, 40, features=1024)
    fit(model, data, epochs=8)
    model.compile(optimizer="adam", loss="mse")
    fit(model, data, epochs=8)


def unfreezing() -> None:
    """Fine-tune: at first the last layer, then all, with a new optimizer and its slots."""
    reserve()
    model = dense(768, depth=3, optimizer="adam")
    for layer in model.layers[:-1]:
        layer.trainable = False
    model.compile(optimizer="adam", loss="mse")
    fit(model, steady(128, 50), epochs=9)
    for layer in model.layers:
        layer.trainable = True
    model.compile(optimizer="adam", loss="mse")
    fit(model, steady(128, 50), epochs=9)


def retracing() -> None:
    """Use batches of a new shape in each epoch, for which the step is retraced."""
    reserve()
    weights = tf.Variable(tf.ones((FEATURES, 1024)) / FEATURES)

    @tf.function  # type: ignore[untyped-decorator] # TensorFlow's
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.nn.relu(x @ weights)))
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        return loss

    with watched("retracing") as run:
        for epoch in run.epochs(24):
            x = tf.ones((200 + 8 * (epoch * 5 % 24), FEATURES))
            for _ in range(50):
                step(x)
                time.sleep(0.006)
                run.step(batch_size=int(x.shape[0]))


def bucketed_lengths() -> None:
    """Use batches in buckets of lengths, at random."""
    reserve()
    random = np.random.default_rng(3)
    fit(dense(1024, optimizer="adam"), stream(lambda: iter(random.choice([64, 128, 256, 512, 1024], 60))), epochs=20)


def longer_and_longer() -> None:
    """Sort sentences by length over the epochs: a curriculum that needs more memory until its end."""
    reserve()
    sizes = np.linspace(64, 1024, 60).astype(int)
    fit(dense(1024), stream(lambda: iter(sizes)), epochs=18)


def sawtooth_in_epochs() -> None:
    """Keep the inputs of an epoch's metrics until its end."""
    reserve()
    tooth = Each(on_train_batch_end=lambda _: HELD.append(tensor(1)), on_epoch_end=lambda _: HELD.clear())
    fit(dense(1024), steady(256, 60), tooth, epochs=18)


def sawtooth_over_epochs() -> None:
    """Keep memory for five epochs, then release it."""
    reserve()
    keep = Each(on_epoch_end=lambda epoch: HELD.append(tensor(20)) if epoch % 5 < 4 else HELD.clear())
    fit(dense(1024), steady(256, 40), keep, epochs=32)


def nearly_full() -> None:
    """Use nearly all of the device, all the time."""
    reserve()
    HELD.append(tensor(int(DEVICE.held()[os.getpid()] / MIB) - 16 - 24))
    fit(dense(1024), steady(256, 60), epochs=16)


def nearly_full_growing_pool() -> None:
    """The same, in a pool that grew on demand."""
    HELD.append(tensor(100))
    HELD.append(tensor(80))
    fit(dense(1024), steady(256, 60), epochs=16)


def cache_of_the_first_epoch() -> None:
    """Cache the data set while it is read the first time."""
    reserve()
    data = steady(256, 120, features=512).cache()
    model = dense(512, features=512)
    fit(model, data, epochs=10)


def least_recently_used() -> None:
    """Fill a cache more and more slowly; it drops the oldest entries when it is full."""
    reserve()
    random = np.random.default_rng(5)
    cache: OrderedDict[int, Any] = OrderedDict()

    def look_up(_: int) -> None:
        key = int(random.zipf(1.6)) % 400
        if key not in cache:
            cache[key] = tensor(0.5)
        cache.move_to_end(key)
        if len(cache) > 60:
            cache.popitem(last=False)

    fit(dense(1024), steady(256, 60), Each(on_train_batch_end=look_up), epochs=20)


def folds_eagerly() -> None:
    """Cross-validate with models that run eagerly: each is freed before the next."""
    reserve()
    for _ in range(12):
        model = dense(1536, features=1024, run_eagerly=True)
        fit(model, steady(32, 40, features=1024), epochs=2)
        del model
        keras.backend.clear_session()
        gc.collect()


def turns() -> None:
    """Train, evaluate and predict in turns."""
    reserve()
    model = dense(1024, optimizer="adam")
    for _ in range(12):
        fit(model, steady(256, 60))
        model.evaluate(steady(512, 20), verbose=0, callbacks=[callback()])
        model.predict(steady(1024, 10).map(lambda x, _: x), verbose=0, callbacks=[callback()])


def validated() -> None:
    """Validate after each epoch, with larger batches than training."""
    reserve()
    fit(dense(1024), steady(256, 60), epochs=18, validation_data=steady(2048, 8))


def several_steps_an_execution() -> None:
    """Make eight steps in one call."""
    reserve()
    fit(dense(1024, steps_per_execution=8), steady(256, 64).repeat(), epochs=18, steps_per_epoch=64)


def mixed_batches() -> None:
    """End each epoch with a partial batch, and double one batch in ten."""
    reserve()

    def sizes() -> Iterator[int]:
        for index in range(60):
            yield 512 if index % 10 == 7 else 256
        yield 37

    fit(dense(1024), stream(sizes), epochs=18)


def checkpoints() -> None:
    """Save the model after each epoch, and load it now and then."""
    reserve()
    model = dense(1024, features=1024, optimizer="adam")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.weights.h5"
        saves = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        restores = Each(on_epoch_begin=lambda epoch: model.load_weights(path) if epoch in (6, 12) else None)
        fit(model, steady(128, 50, features=1024), saves, restores, epochs=18)


def losses_as_floats() -> None:
    """Keep each step's loss, as a number."""
    reserve()
    weights = tf.Variable(tf.ones((FEATURES, 1024)) / FEATURES)
    losses = []
    with watched("losses_as_floats") as run:
        for _ in run.epochs(24):
            for _ in range(60):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(tf.nn.relu(tf.ones((256, FEATURES)) @ weights)))
                weights.assign_sub(0.01 * tape.gradient(loss, weights))
                losses.append(float(loss))
                time.sleep(0.006)
                run.step(batch_size=256, loss=losses[-1])


def history_in_python() -> None:
    """Keep a small record of each step in Python: some megabytes until the end."""
    reserve()
    fit(
        dense(1024),
        steady(256, 60),
        Each(on_train_batch_end=lambda batch: HELD.append({"batch": batch, "at": time.time(), "lr": [0.1] * 20})),
        epochs=20,
    )


def average_of_weights() -> None:
    """Keep a moving average of the weights from the middle on."""
    reserve()
    model = dense(2048, features=1024)

    def average(epoch: int) -> None:
        if epoch == 9:
            HELD.extend(tf.identity(each) for each in model.trainable_variables)
        elif epoch > 9:
            HELD[:] = [0.9 * old + 0.1 * new for old, new in zip(HELD, model.trainable_variables, strict=True)]

    fit(model, steady(128, 50, features=1024), Each(on_epoch_end=average), epochs=20)


def moving_average_by_keras() -> None:
    """Let Keras keep a moving average of the weights."""
    reserve()
    model = dense(2048, features=1024, optimizer=keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=50))
    fit(model, steady(128, 50, features=1024), epochs=18)


def warm_up_of_batches() -> None:
    """Increase the batch size in the first third, as planned."""
    reserve()
    model = dense(2048)
    for size in (32, 64, 128, 256, 512):
        fit(model, steady(size, 50))
    fit(model, steady(1024, 50), epochs=12)


def own_loop() -> None:
    """Run a custom loop without epochs, in a pool that grows."""
    weights = tf.Variable(tf.ones((FEATURES, 2048)) / FEATURES)
    with watched("own_loop") as run:
        for _ in range(1400):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.nn.relu(tf.ones((256, FEATURES)) @ weights)))
            weights.assign_sub(0.01 * tape.gradient(loss, weights))
            time.sleep(0.006)
            run.step(batch_size=256)


def shuffling_buffer() -> None:
    """Fill a shuffle buffer of a Python loader during the first steps."""
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

    fit(dense(1024), stream(sizes, pause=0.008), epochs=1)


def shuffled_by_tensorflow() -> None:
    """Use tf.data's shuffle buffer, which is full before the first step of each epoch."""
    reserve()
    data = steady(8, 400, features=2048, pause=0.001).shuffle(200)
    fit(dense(512, features=2048), data, epochs=8)


def workers_of_the_input() -> None:
    """Load with worker processes, which have grown once they have read their first files."""
    import multiprocessing  # noqa: PLC0415 - of this one alone

    reserve(0.5)
    with multiprocessing.get_context("fork").Pool(2) as pool:

        def sizes() -> Iterator[int]:
            yield from pool.imap(_read_file, range(900))

        fit(dense(512), stream(sizes))


def _read_file(index: int) -> int:
    if len(HELD) < 40:
        HELD.append(np.ones(MIB // 8))
    time.sleep(0.02)
    return 128 + index % 2


def mapped_file() -> None:
    """Read a mapped file, of which more and more pages become resident until all were read once."""
    reserve(0.5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data"
        np.ones((300, MIB // 4), "float32").tofile(path)
        data = np.memmap(path, "float32", "r", shape=(300, MIB // 4))

        def sizes() -> Iterator[int]:
            for row in data:
                yield int(row.sum() / row.size) * 128

        fit(dense(512), stream(sizes), epochs=5)


def garbage_in_cycles() -> None:
    """Leave arrays in reference cycles until the garbage collector runs."""
    reserve(0.5)
    gc.disable()

    def litter(batch: int) -> None:
        cycle: list[Any] = [np.ones(MIB // 8)]
        cycle.append(cycle)
        if batch % 100 == 99:
            gc.collect()

    fit(dense(512), steady(128, 300), Each(on_train_batch_end=litter), epochs=5)


def accumulated_gradients() -> None:
    """Accumulate gradients over eight steps."""
    reserve()
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=8)
    fit(dense(1024, features=512, optimizer=optimizer), steady(128, 60, features=512), epochs=18)


def replay_memory() -> None:
    """Fill a replay buffer in the first quarter; then each entry replaces the oldest."""
    reserve()
    buffer: deque[Any] = deque(maxlen=300)
    weights = tf.Variable(tf.ones((FEATURES, 1024)) / FEATURES)
    with watched("replay_memory") as run:
        for step in range(1300):
            buffer.append(tensor(0.25) if step < 300 or step % 2 else buffer[0])
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.nn.relu(tf.ones((256, FEATURES)) @ weights)))
            weights.assign_sub(0.01 * tape.gradient(loss, weights))
            time.sleep(0.006)
            run.step(batch_size=256)


def one_long_epoch() -> None:
    """Train for one epoch of unknown length."""
    reserve()
    fit(dense(1024, optimizer="adam"), steady(256, 1200))


def short_epochs() -> None:
    """Train in epochs of three steps."""
    reserve()
    fit(dense(1024, optimizer="adam"), steady(256, 3), epochs=250)


if __name__ == "__main__":
    play({name: each for name, each in globals().items() if getattr(each, "__module__", "") == "__main__"})
