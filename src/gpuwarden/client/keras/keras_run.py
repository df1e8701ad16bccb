"""Run of this process as Keras shows it: joined with Keras's backend and devices; its memory in an epoch's logs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from math import nan

from gpuwarden.client.frameworks import make_adapter
from gpuwarden.client.frameworks.allocator_memory import add_named_devices
from gpuwarden.client.frameworks.no_gpu import find_no_gpu_reason
from gpuwarden.client.hello import make_hello
from gpuwarden.client.keras_import import keras
from gpuwarden.client.reporter import Reporter, join_run
from gpuwarden.client.settings import Settings

_GIB = 1 << 30


def join_keras_run(settings: Settings, *, stepped: bool) -> tuple[Reporter, bool]:
    """Join this process's run; return it, and whether its hello is final: it has the devices, or why there are none.

    `stepped`: the run has made a step. The devices exist when Keras calls a hook, so listing them freezes no options.
    """
    backend = keras.backend.backend()
    framework = make_adapter(backend)
    names = add_named_devices(framework.list_devices() if framework else {}, settings.devices)
    hello = make_hello(
        settings.name,
        f"{backend} {_read_version(backend)} keras {_read_version(keras.__name__)}",
        names,
        find_no_gpu_reason(backend) if stepped and not names else None,
    )
    run = join_run(settings.socket, hello, census=settings.census, summary=settings.summary, headroom=settings.logs)
    run.interval = settings.interval
    if framework:
        run.memory.watch(framework, names)
    return run, stepped or bool(names)


def _read_version(module: str) -> str:
    return getattr(sys.modules.get(module), "__version__", "")


def read_memory_logs(run: Reporter) -> dict[str, float]:
    """Return memory in use, its peak and the headroom in GiB, each of the fullest device; NaN where unknown.

    Always the same keys: CSVLogger writes those of the first epoch, and History has a list for each.
    """
    memory = run.memory.latest().values()
    return {
        "gpu_memory_gib": _max_gib(each.current for each in memory),
        "gpu_memory_peak_gib": _max_gib(each.peak for each in memory),
        "gpu_headroom_gib": nan if run.headroom is None else run.headroom / _GIB,
    }


def _max_gib(figures: Iterable[int]) -> float:
    return max(figures, default=nan) / _GIB
