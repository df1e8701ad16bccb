"""Train on all GPUs of this machine: `python examples/mirrored.py`. Without GPUs, on two logical CPU devices.

Each GPU's memory is reported separately, from TensorFlow's allocator for it.
"""

import numpy as np
import tensorflow as tf

from gpuwarden.keras import GpuWarden, keras

if tf.config.list_physical_devices("GPU"):
    strategy = tf.distribute.MirroredStrategy()
else:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

with strategy.scope():
    model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")

x = np.random.default_rng(1).normal(size=(8_000, 32)).astype("float32")
batch_size = 64 * strategy.num_replicas_in_sync  # for all devices together
model.fit(x, x[:, :1], batch_size=batch_size, epochs=3, callbacks=[GpuWarden(name="mirrored")])
