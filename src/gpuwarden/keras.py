"""API for Keras: the callback `GpuWarden`, `find_batch_size` and `fit_with_oom_retry`."""

from gpuwarden.client.keras.callback import GpuWarden
from gpuwarden.client.keras_import import keras
from gpuwarden.tuning.find_batch_size import find_batch_size
from gpuwarden.tuning.oom_retry import fit_with_oom_retry

__all__ = ["GpuWarden", "find_batch_size", "fit_with_oom_retry", "keras"]
