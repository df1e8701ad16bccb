"""Train, and retry with a smaller batch if memory runs out: `python examples/oom_retry.py`. Needs no daemon or GPU.

Without a GPU it trains like any fit. To see it recover from an out-of-memory, set a limit for TensorFlow's CPU
allocator: TF_CPU_ALLOCATOR_USE_BFC=1 TF_CPU_BFC_MEM_LIMIT_IN_MB=8 TF_ENABLE_ONEDNN_OPTS=0.
"""

import numpy as np
import tensorflow as tf

from gpuwarden.keras import GpuWarden, fit_with_oom_retry, keras

generator = np.random.default_rng(1)
x = generator.normal(size=(8_192, 32)).astype("float32")
y = (x.sum(axis=1) > 0).astype("float32")

model = keras.Sequential(
    [
        keras.layers.Input((32,)),
        keras.layers.Dense(512, activation="relu"),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(optimizer="adam", loss="binary_crossentropy")


def make_dataset(size: int) -> tf.data.Dataset:
    """Return the training data for a batch size."""
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1024, seed=1).batch(size)


history = fit_with_oom_retry(
    model,
    make_dataset,
    batch_size=1024,
    epochs=3,
    callbacks=[GpuWarden(name="oom retry")],
)
print(f"batch sizes by epoch: {history.batch_sizes}, retries after an out-of-memory: {history.oom_retries}")
