"""Trainings that leak until memory is full: `python leaks.py NAME [--without]`; labels.py says what each leaks.

Without the cause the same training keeps nothing. Each prints `growing` when it starts to leak.
"""

# ruff: noqa: D103 - the docstrings say what happens

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from shared_device import MIB
from training import FEATURES, Each, dense, fit, play, preallocate, reserve, say, steady, stream, watched

KEPT: list[Any] = []


def keep(mebibytes: float, *, cause: bool) -> None:
    """Allocate a tensor, and keep it."""
    made = tf.zeros((int(mebibytes * MIB) // 4,))
    if cause:
        KEPT.append(made)


def leak_step(*, cause: bool) -> None:
    preallocate()
    model = dense(1024, optimizer="adam")
    say("growing")
    fit(model, steady(256, 60, pause=0.008), Each(on_train_batch_end=lambda _: keep(0.18, cause=cause)), epochs=40)


def leak_epoch(*, cause: bool) -> None:
    """Keep a copy of the weights and more for each epoch's best model."""
    preallocate()
    model = dense(1024, optimizer="adam")
    say("growing")
    fit(model, steady(256, 50, pause=0.008), Each(on_epoch_end=lambda _: keep(9, cause=cause)), epochs=60)


def leak_validation(*, cause: bool) -> None:
    """Keep the results of validation, batch by batch."""
    preallocate()
    model = dense(1024, optimizer="adam")
    say("growing")
    keeps = Each(on_test_batch_end=lambda _: keep(1, cause=cause))
    fit(model, steady(256, 40, pause=0.006), keeps, epochs=60, validation_data=steady(256, 9, pause=0.004))


def leak_variable(*, cause: bool) -> None:
    """Use batches of many sizes, and keep something in proportion to each."""
    preallocate()
    random = np.random.default_rng(7)
    weights = tf.Variable(tf.ones((FEATURES, 1024)) / FEATURES)
    say("growing")
    with watched("leak_variable") as run:
        for _ in range(3000):
            size = int(random.choice([64, 128, 256, 512, 1024]))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.nn.relu(tf.ones((size, FEATURES)) @ weights)))
            weights.assign_sub(0.01 * tape.gradient(loss, weights))
            keep(size / 2600, cause=cause)
            time.sleep(0.008)
            run.step(batch_size=size)


def leak_staircase(*, cause: bool) -> None:
    """Keep a snapshot in every fourth epoch."""
    preallocate()
    model = dense(1024, optimizer="adam")
    say("growing")
    snap = Each(on_epoch_end=lambda epoch: keep(16, cause=cause) if epoch % 4 == 3 else None)
    fit(model, steady(256, 30, pause=0.006), snap, epochs=120)


def leak_slow(*, cause: bool) -> None:
    """Leak like leak_step, slower and at default settings."""
    preallocate()
    model = dense(1024, optimizer="adam")
    say("growing")
    fit(model, steady(256, 100, pause=0.008), Each(on_train_batch_end=lambda _: keep(0.095, cause=cause)), epochs=40)


def leak_growing_pool(*, cause: bool) -> None:
    """Leak in a pool that grows, so that the driver sees it."""
    weights = tf.Variable(tf.ones((FEATURES, 1024)) / FEATURES)
    say("growing")
    with watched("leak_growing_pool") as run:
        for _ in range(1800):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.nn.relu(tf.ones((256, FEATURES)) @ weights)))
            weights.assign_sub(0.01 * tape.gradient(loss, weights))
            keep(0.16, cause=cause)
            time.sleep(0.008)
            run.step(batch_size=256)


def leak_folds(*, cause: bool) -> None:
    """Cross-validate and compile a model for each fold, whose memory TensorFlow 2.21 never frees."""
    import gc  # noqa: PLC0415 - shows that it is no matter of garbage

    preallocate()
    say("growing")
    for _ in range(40 if cause else 20):
        model = dense(1536, features=2048, run_eagerly=not cause)  # 12 MiB
        fit(model, steady(32, 12, features=2048, pause=0.002))
        del model
        tf.keras.backend.clear_session()
        gc.collect()


def leak_history(*, cause: bool) -> None:
    """Keep losses as tensors, with the features of which they were computed; epochs of unknown length."""
    preallocate()
    weights = tf.Variable(tf.ones((FEATURES, 384)) / FEATURES)
    say("growing")
    with watched("leak_history") as run:
        for _ in run.epochs(60):
            for _ in range(40):
                features = tf.nn.relu(tf.ones((32, FEATURES)) @ weights)
                loss = tf.reduce_mean(tf.square(features))
                # The largest is wanted last, and is refused first: Eigen hangs in a sum that gets no scratch.
                maps = tf.tile(features, (5, 1))  # 0.23 MiB
                if cause:
                    KEPT.append((loss, maps))
                time.sleep(0.012)
                run.step(batch_size=128)


def leak_host(*, cause: bool) -> None:
    """Keep arrays in Python, in a container with a memory limit."""
    reserve(0.5)
    model = dense(512)

    def keep_array(_: int) -> None:
        made = np.ones(MIB // 14)
        if cause:
            KEPT.append(made)

    say("growing")
    fit(model, steady(128, 60, pause=0.008), Each(on_train_batch_end=keep_array), epochs=60)


def leak_host_worker(*, cause: bool) -> None:
    """Let the input's process keep what it has read."""
    import multiprocessing  # noqa: PLC0415 - of this one alone

    reserve(0.5)
    receiving, sending = multiprocessing.get_context("fork").Pipe(duplex=False)
    worker = multiprocessing.get_context("fork").Process(target=_read_on, args=(sending, cause), daemon=True)
    worker.start()
    sending.close()  # so that its death ends what waits for it

    def sizes() -> Iterator[int]:
        for _ in range(4000):
            yield receiving.recv()

    say("growing")
    fit(dense(512), stream(sizes))


def _read_on(sending: Any, cause: bool) -> None:  # noqa: FBT001 - by position, to a process
    while True:
        made = np.ones(MIB // 12)
        if cause:
            KEPT.append(made)
        time.sleep(0.012)
        sending.send(128)


if __name__ == "__main__":
    play({name: each for name, each in globals().items() if name.startswith("leak_")})
