"""Find the largest batch size that fits, then train with it: `python examples/batch_size.py`. Needs no daemon or GPU.

Without a GPU, every size up to `largest` fits. To see it find a limit, set one for TensorFlow's CPU allocator:
TF_CPU_ALLOCATOR_USE_BFC=1 TF_CPU_BFC_MEM_LIMIT_IN_MB=64 TF_ENABLE_ONEDNN_OPTS=0.
"""

import numpy as np

from gpuwarden.keras import GpuWarden, find_batch_size, keras

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

# Trains a few steps of each size and then restores the model: the training below starts from scratch.
size = find_batch_size(model, (x, y), smallest=32, largest=512)
print(f"batch size {size}")

model.fit(x, y, batch_size=size, epochs=3, callbacks=[GpuWarden(name="batch size")])
