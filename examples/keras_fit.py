"""Train a small model with Keras and report it: `python examples/keras_fit.py`. Needs no daemon or GPU.

With a daemon, the run is on the status page while it trains and for a while afterwards.
"""

import numpy as np

from gpuwarden.keras import GpuWarden, keras  # `import keras` works too

generator = np.random.default_rng(1)
x = generator.normal(size=(8_000, 32)).astype("float32")
y = (x.sum(axis=1) > 0).astype("float32")

model = keras.Sequential(
    [
        keras.layers.Input((32,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])

callback = GpuWarden(name="keras_fit", loss=True)
model.fit(x, y, batch_size=64, epochs=3, validation_split=0.1, callbacks=[callback])

# Pass the same callback to evaluate and predict: everything is one run.
model.evaluate(x, y, batch_size=256, callbacks=[callback])
