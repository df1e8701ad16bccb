"""The Keras callback: `model.fit(..., callbacks=[GpuWarden()])` makes a training process report to the daemon.

Training never suffers from it: no hook blocks, raises, reads logs, or forces the device to synchronize.
"""

# ruff: noqa: ARG002, D102 - Keras fixes the hooks' arguments and says what each hook is for

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Concatenate, ParamSpec

from gpuwarden.client.frameworks.tensorflow import TensorFlow
from gpuwarden.client.memory import with_named
from gpuwarden.client.run import REPORT_INTERVAL, Run, default_name, join
from gpuwarden.client.steps import Steps
from gpuwarden.protocol import MAX_LIST, Hello, Phase, clip

MAX_ERRORS = 5  # failures of our own until the callback switches itself off
_OF_ONE_FIT = {"_run", "_steps", "_watched", "_model", "model"}

P = ParamSpec("P")
log = logging.getLogger("gpuwarden")


def _import_keras() -> Any:
    """Give the Keras that models are made with here."""
    names = ["keras", "tf_keras", "tensorflow.keras"]
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        names.sort(key="tf_keras".__ne__)
    errors = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            errors.append(f"{name}: {error}")
    raise ImportError(
        "gpuwarden.keras needs Keras and its backend in this environment: pip install 'gpuwarden[tensorflow]' "
        f"({'; '.join(errors)})"
    )


keras = _import_keras()


def _guarded(hook: Callable[Concatenate[GpuWarden, P], None]) -> Callable[Concatenate[GpuWarden, P], None]:
    """Keep a failing hook from the training it watches."""

    @functools.wraps(hook)
    def guarded(self: GpuWarden, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self._off:
            return
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever fails here must not end a training run
            self._failed(error)

    return guarded


_DEVICE = re.compile(r"[A-Z_]+:[0-9]+")


class GpuWarden(keras.callbacks.Callback):  # type: ignore[misc, name-defined] # Keras ships no types
    """Report this process's training to the gpuwarden daemon; without a daemon it does nothing.

    `name` says what the run is called, by default its script. `devices` says which GPU, by UUID, a TensorFlow device
    stands for, where the daemon cannot know: `{"CPU:0": "GPU-..."}`. `socket` is the daemon's, by default
    GPUWARDEN_SOCKET's or /run/gpuwarden/run.sock. `interval` is the seconds between reports. `disabled`, or
    GPUWARDEN_DISABLED=1, switches it off.
    """

    # Keras 2 would turn the logs of every batch into numbers for a callback without it, and wait for the device.
    _supports_tf_logs = True

    def __init__(
        self,
        *,
        name: str | None = None,
        devices: Mapping[str, str] | None = None,
        socket: str | os.PathLike[str] | None = None,
        interval: float = REPORT_INTERVAL,
        disabled: bool | None = None,
    ) -> None:
        super().__init__()
        if not (math.isfinite(interval) and interval >= 0):
            raise ValueError(f"interval: want seconds, 0 or more, not {interval!r}")
        if not (name is None or isinstance(name, str)):
            raise TypeError(f"name: want text, not {name!r}")
        gpus = {} if devices is None else devices
        if not (isinstance(gpus, Mapping) and all(isinstance(text, str) for pair in gpus.items() for text in pair)):
            raise TypeError(f'devices: want the GPU of each TensorFlow device, {{"GPU:0": "GPU-..."}}, not {devices!r}')
        for device in gpus:
            if not _DEVICE.fullmatch(device):  # TensorFlow would know "/GPU:0", but as a second device beside GPU:0
                raise ValueError(f'devices: want names such as "GPU:0", not {device!r}')
        self._name = name
        self._gpus = dict(gpus)
        self._socket = None if socket is None else os.fspath(socket)
        self._interval = interval
        self._off = os.environ.get("GPUWARDEN_DISABLED") == "1" if disabled is None else disabled
        self._errors = 0
        self._watched: Any = (
            None  # the model: Keras 3's self.model makes JAX copy its state back, Keras 2 has no self._model
        )
        self._run: Run | None = None
        self._steps: Steps | None = None  # of the fit under way

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to one fit of this process."""
        return {**self.__dict__, **dict.fromkeys(_OF_ONE_FIT & self.__dict__.keys())}

    def set_model(self, model: Any) -> None:
        """Take note that fit, evaluate or predict has been called: the only sign that a fit before it has failed."""
        super().set_model(model)
        self._watched = model
        self._standalone = True

    @_guarded
    def on_train_begin(self, logs: Any = None) -> None:
        run, model = self._join(), self._watched
        self._standalone = False
        in_epoch = self.params.get("steps")
        self._steps = Steps(
            run, _steps_per_execution(model), None if in_epoch is None else int(in_epoch), lambda: _updates(model)
        )
        self._enter("train")

    @_guarded
    def on_train_end(self, logs: Any = None) -> None:
        self._enter("idle")

    @_guarded
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._steps is None or self._steps.superseded():
            self._steps = None  # by a second GpuWarden of this fit: one of them counts
            return
        self._standalone = False
        self._steps.begin_epoch()
        self._enter("train", int(epoch))

    @_guarded
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_steps()
        self._report()

    @_guarded
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._steps is not None:
            self._steps.begin()

    @_guarded
    def on_test_begin(self, logs: Any = None) -> None:
        if self._standalone:
            self._join()
        else:
            self._end_steps()
        self._enter("test")

    @_guarded
    def on_test_end(self, logs: Any = None) -> None:
        self._enter("idle" if self._standalone else "train")

    @_guarded
    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._observe()

    @_guarded
    def on_predict_begin(self, logs: Any = None) -> None:
        self._join()
        self._enter("predict")

    @_guarded
    def on_predict_end(self, logs: Any = None) -> None:
        self._enter("idle")

    @_guarded
    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._observe()

    def _join(self) -> Run:
        """Take part in this process's run; its devices exist by now, so that asking for them freezes nothing."""
        backend = keras.backend.backend()
        framework = TensorFlow() if backend == "tensorflow" else None
        names = with_named(framework.devices() if framework else {}, self._gpus)
        hello = Hello(
            name=clip(self._name or default_name()),
            framework=clip(f"{backend} {_version(backend)} keras {_version(keras.__name__)}"),
            devices={clip(device): gpu and clip(gpu) for device, gpu in names.items()},
            visible_devices=_environment("CUDA_VISIBLE_DEVICES"),
            device_order=_environment("CUDA_DEVICE_ORDER"),
        )
        self._run = run = join(self._socket, hello)
        run.interval = self._interval
        if framework:
            run.memory.watch(framework, names)
        return run

    def _enter(self, phase: Phase, epoch: int | None = None) -> None:
        assert self._run is not None
        self._run.phase = phase
        if epoch is not None:
            self._run.epoch, self._run.batch = epoch, 0
        self._report()

    def _report(self) -> None:
        assert self._run is not None
        self._run.report(monotonic())

    def _observe(self) -> None:
        assert self._run is not None
        now = monotonic()
        if now >= self._run.due:
            self._run.observe(now)

    def _end_steps(self) -> None:
        if self._steps is not None:
            self._steps.end_epoch(stopped=bool(self._watched.stop_training))

    def _failed(self, error: Exception) -> None:
        self._errors += 1
        if self._errors >= MAX_ERRORS:
            self._off = True
            with contextlib.suppress(Exception):  # a logging handler of the user's may raise
                log.warning("callback switched off after errors=%d; training goes on", self._errors, exc_info=error)


def _steps_per_execution(model: Any) -> int:
    """Read the model's steps_per_execution: a number in Keras 3, a variable under another name in Keras 2."""
    value = getattr(model, "steps_per_execution", None) or getattr(model, "_steps_per_execution", None)
    return 1 if value is None else int(value.numpy() if hasattr(value, "numpy") else value)


def _updates(model: Any) -> int | None:
    """Read how often the optimizer has updated the weights, about 20 µs; None where it does not count each step."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or getattr(optimizer, "gradient_accumulation_steps", None):
        return None
    return int(optimizer.iterations.numpy())


def _version(module: str) -> str:
    return getattr(sys.modules.get(module), "__version__", "")


def _environment(variable: str) -> str | None:
    """Read a variable; of a list that is too long the whole entries that fit, since half an index is another GPU's."""
    value = os.environ.get(variable)
    if value is not None and len(value) > MAX_LIST:
        value = value[:MAX_LIST].rpartition(",")[0]
    return None if value is None else clip(value, MAX_LIST)
