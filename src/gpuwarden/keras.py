"""Keras facade: the callback `GpuWarden`, and fits whose batch size follows the memory of the device."""

from gpuwarden.client.keras.callback import GpuWarden
from gpuwarden.client.keras_import import keras
from gpuwarden.tuning.find_batch_size import find_batch_size
from gpuwarden.tuning.oom_retry import fit_with_oom_retry

__all__ = ["GpuWarden", "find_batch_size", "fit_with_oom_retry", "keras"]
