"""Run of this process as the Keras callback reports it: with Keras's backend and its devices."""

from __future__ import annotations

import sys

from gpuwarden.client.frameworks import make_adapter
from gpuwarden.client.frameworks.allocator_memory import add_named_devices
from gpuwarden.client.frameworks.no_gpu import find_no_gpu_reason
from gpuwarden.client.hello import make_hello
from gpuwarden.client.keras_import import keras
from gpuwarden.client.reporter import Reporter, join_run
from gpuwarden.client.settings import Settings


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
