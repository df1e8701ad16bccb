"""Trainings whose memory is free, but in pieces: without their cause as much is in use, in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from training_run import (
    allocate_tensor,
    compiled_step,
    eager_steps,
    fit,
    layers,
    main,
    make_dense_model,
    make_steady_stream,
    make_watch,
    preallocate,
    reserve,
)

from gpuwarden.keras import keras
from labels import BATCH, training


@training("fragmentation")
def fragmented_cache(*, cause: bool) -> None:
    """Entries of a cache of many sizes come and go, next to a Keras training."""
    reserve()
    sizes = np.random.default_rng(1).uniform(2, 6, 55)
    cache = {index: allocate_tensor(size) for index, size in enumerate(sizes)}
    model = make_dense_model(1024, optimizer="adam")
    fit(model, make_steady_stream(256, 100))
    kept = [index for index in cache if index % 3 == 0]
    cache = {index: cache[index] for index in kept} if cause else {}
    if not cause:
        cache = {index: allocate_tensor(sizes[index]) for index in kept}
    fit(model, make_steady_stream(256, 150), epochs=2)
    fit(model, make_steady_stream(6000, 3))  # 23 MiB a tensor


@training("fragmentation")
def fragmented_regions(*, cause: bool) -> None:
    """A pool grew in pieces, none of which is large enough, though nearly nothing is in use."""
    with make_watch("fragmented_regions") as run:
        for mebibytes in (0.5, 1, 3, 6, 12, 24, 50) if cause else ():
            held = allocate_tensor(mebibytes)
            eager_steps(run, 0.7)
            del held
        eager_steps(run, 2)
        wanted = allocate_tensor(120)
        eager_steps(run, 1)
        del wanted


# github.com/tensorflow/tensorflow/issues/23953
@training("fragmentation", advises="alloc|fragment", never=BATCH)
def churned(*, cause: bool) -> None:
    """Cached features of mixed sizes come and go for 300 steps; then 64 MiB are requested."""
    preallocate()
    random = np.random.default_rng(25)

    def utterance() -> Any:
        return tf.zeros((int(random.uniform(1, 6) * 1024), 256))

    kept = [utterance() for _ in range(38)]
    model = keras.Sequential([layers.Input((80, 24)), layers.Conv1D(32, 5, activation="relu"), layers.GRU(16)])
    step = compiled_step(model, keras.optimizers.Adam(), lambda x: tf.reduce_mean(tf.square(model(x))))
    with make_watch("churned") as run:
        for _ in range(300):
            kept.pop(int(random.integers(len(kept))))
            kept.append(utterance())
            step(tf.random.normal((32, 80, 24)))
            run.step(batch_size=32)
        if not cause:
            shapes = [each.shape for each in kept]
            kept.clear()
            kept = [tf.zeros(each) for each in shapes]
        scores = allocate_tensor(64)
        run.step(batch_size=32)
        del scores


if __name__ == "__main__":
    main()
