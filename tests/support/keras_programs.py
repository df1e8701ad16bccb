"""Keras programs that know nothing of gpuwarden, under the environment of `gpuwarden run`."""

from __future__ import annotations

from pathlib import Path

import pytest
from instrumented_program import SOURCE, EndedProgram, ProgramServer

from system_parts import require, skip_without

KERAS2 = Path(__file__).parents[2] / "build/keras2"
BACKENDS = [
    "tensorflow",
    *(pytest.param(name, marks=pytest.mark.frameworks) for name in ("jax", "torch", "tf_keras", "keras2")),
]

MODEL = """
import os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if os.environ.get("TF_USE_LEGACY_KERAS"):
    import tf_keras as keras
else:
    import keras
import numpy as np

X, Y = np.ones((32, 3), "float32"), np.ones((32, 1), "float32")

def make_model(**settings):
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse", **settings)
    return model

def fit(model, **settings):
    return model.fit(X, Y, **{"batch_size": 4, "epochs": 2, "verbose": 0, **settings})

def steps(model):
    iterations = model.optimizer.iterations
    return int(iterations.numpy() if hasattr(iterations, "numpy") else iterations)

model = make_model()
"""

FITS = {
    "plain": "fit(model)",
    "one callback": "fit(model, callbacks=keras.callbacks.TerminateOnNaN())",
    "callbacks in lists": "fit(model, callbacks=[[keras.callbacks.TerminateOnNaN()], [keras.callbacks.History()]])",
    "validation": "fit(model, validation_data=(X, Y)); model.evaluate(X, Y, verbose=0); model.predict(X, verbose=0)",
    "two fits": "fit(model); fit(model, epochs=1)",
    "own callback list": """
callbacks = keras.callbacks.CallbackList([], add_history=True, model=model, epochs=2, steps=8, verbose=0)
fit(model, callbacks=callbacks)
""",
    "own fit": """
class Model(keras.Sequential):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)
model = Model([keras.layers.Input((3,)), keras.layers.Dense(1)])
model.compile(optimizer="adam", loss="mse")
fit(model)
""",
    "stopped": """
class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 4
fit(model, callbacks=[Stop()], epochs=1)
""",
}

OWN = {
    "own callback": "from gpuwarden.keras import GpuWarden\nfit(model, callbacks=[GpuWarden()])",
    "own callback, copied": """
import copy
from gpuwarden.keras import GpuWarden
fit(model, callbacks=[copy.deepcopy(GpuWarden())])
""",
    "own callback later": """
fit(model, epochs=1)
from gpuwarden.keras import GpuWarden
fit(model, epochs=1, callbacks=[GpuWarden()])
""",
    "own watch": """
from gpuwarden import watch
class Counts(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.run = watch("own watch")
    def on_train_batch_end(self, batch, logs=None):
        self.run.step()
    def on_train_end(self, logs=None):
        self.run.close()
fit(model, callbacks=[Counts()])
""",
}


def serve_keras(backend: str) -> ProgramServer:
    """Start a server of programs that has imported the Keras of a backend."""
    if backend == "tf_keras":
        require(any((KERAS2 / "tf_keras").glob(".for-*")), "tf_keras is not installed: tools/keras2.sh")
        return ProgramServer("tf_keras", path=(KERAS2 / "tf_keras", SOURCE), TF_USE_LEGACY_KERAS="1")
    if backend == "keras2":
        require((KERAS2 / "tensorflow/.installed").exists(), "TensorFlow 2.15 is not installed: tools/keras2.sh")
        return ProgramServer("keras", python=KERAS2 / "tensorflow/bin/python")
    skip_without(backend)
    return ProgramServer("keras", KERAS_BACKEND=backend)


def run_keras(server: ProgramServer, folder: Path, *lines: str) -> EndedProgram:
    """Run a program that ends with the optimizer's count of steps."""
    return server.run(folder, MODEL, *lines, "print('steps', steps(model))")
