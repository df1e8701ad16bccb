"""One worker of a MultiWorkerMirroredStrategy, placed by TF_CONFIG; run by the tests."""

import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # before TensorFlow is imported

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else asks TensorFlow for its devices

from gpuwarden.keras import GpuWarden, keras  # noqa: E402 - see above

with strategy.scope():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((16, 3), "float32")
dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4).repeat()
model.fit(dataset, epochs=2, steps_per_epoch=4, verbose=0, callbacks=[GpuWarden(loss=True, interval=0)])
sys.stdout.write(f"{strategy.num_replicas_in_sync} replicas\n")
