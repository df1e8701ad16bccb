"""One worker of a MultiWorkerMirroredStrategy, placed by TF_CONFIG, for tests; rank 1 gets advice.

`keras_advice_worker.py PATH`: three fits, one for each wish; prints what came of them.
"""

import json
import os
import sys
import time
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # before TensorFlow is imported

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else asks TensorFlow for its devices

from gpuwarden.keras import GpuWarden, keras  # noqa: E402 - see above

RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
MAX_WAIT_SECONDS = 60  # seconds


class AdviceWaiter(keras.callbacks.Callback):  # type: ignore[misc] # Keras ships no types
    """Has the advised worker wait for its advice before the second epoch, and notes the weights after each."""

    def __init__(self, callback: GpuWarden) -> None:
        super().__init__()
        self.callback = callback
        self.weights: list[Any] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002, D102
        run = self.callback._run
        limit = time.monotonic() + MAX_WAIT_SECONDS
        while epoch == 1 and RANK == 1 and run and not run.advice.count and time.monotonic() < limit:
            time.sleep(0.01)
            run.listen(time.monotonic())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002, D102
        self.weights.append(list_weights(self.model))


def list_weights(model: Any) -> list[Any]:
    """Return a model's weights as lists."""
    return [each.tolist() for each in model.get_weights()]


with strategy.scope():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.ones((16, 3), "float32")
dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4).repeat()


def fit(epochs: int, callback: GpuWarden, *more: Any) -> int:
    """Fit, and return the number of epochs."""
    made = model.fit(dataset, epochs=epochs, steps_per_epoch=4, verbose=0, callbacks=[*more, callback])
    return len(made.history["loss"])


calls: list[Any] = []
saves = GpuWarden(on_pressure="checkpoint", checkpoint_path=sys.argv[1], interval=0)
waits = AdviceWaiter(saves)
fits = [fit(3, saves, waits)]
fits.append(fit(5, GpuWarden(on_pressure="stop", interval=0)))
# One that is switched off still answers the others, who would wait for it.
called = GpuWarden(on_pressure=lambda advice, _: calls.append(advice and advice.text), disabled=RANK == 0, interval=0)
fits.append(fit(2, called))
saved = list_weights(keras.models.load_model(sys.argv[1])) if RANK == 0 else None
result = {"epochs": fits, "calls": calls, "weights": list_weights(model), "saved": saved, "after_epochs": waits.weights}
sys.stdout.write(json.dumps(result) + "\n")
