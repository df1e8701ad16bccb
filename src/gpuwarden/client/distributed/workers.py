"""Workers that train a model together with this process, and their agreement before an action.

An action of one worker alone may make all others wait forever.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from gpuwarden.client.distributed.job_place import read_job_place
from gpuwarden.client.frameworks import list_running_frameworks

# By name, since TensorFlow is not imported here.
ONE_DEVICE = ("_DefaultDistributionStrategy", "OneDeviceStrategy")
IN_ONE_PROCESS = (*ONE_DEVICE, "MirroredStrategy")
_WORKERS = ("CollectiveAllReduceStrategy", "_CollectiveAllReduceStrategyExperimental", "MultiWorkerMirroredStrategy")


def read_strategy(model: Any) -> str:
    """Return the type name of the model's tf.distribute strategy, "NoneType" on other backends."""
    return type(getattr(model, "distribute_strategy", None)).__name__


def is_in_one_process(model: Any) -> bool:
    """Return whether the model's steps run in this process only, as far as its strategy shows."""
    return read_strategy(model) in (*IN_ONE_PROCESS, "NoneType")


def has_workers(model: Any) -> bool:
    """Return whether the model is trained by several workers that can vote, see `agree`."""
    return read_strategy(model) in _WORKERS


def find_reason_not_to_act(model: Any) -> str | None:
    """Return why this process may neither act alone nor vote; None if it may."""
    strategy = read_strategy(model)
    if strategy not in (*IN_ONE_PROCESS, *_WORKERS, "NoneType"):
        return f"under {strategy}"
    others = max(read_job_place(os.environ).world_size or 1, _count_jax_processes(), _count_torch_workers())
    return None if others == 1 or strategy in _WORKERS else f"in one of {others} processes of a job"


def is_first() -> bool:
    """Return whether this is the worker that writes shared files."""
    return not read_job_place(os.environ).rank


def agree(model: Any, *, wanted: bool) -> bool:
    """Return whether any worker of the model's strategy wants it. Blocks until every worker has called this."""
    tf, strategy = sys.modules["tensorflow"], model.distribute_strategy
    votes = strategy.run(lambda: tf.constant(int(wanted)))
    return bool(strategy.reduce(tf.distribute.ReduceOp.SUM, votes, axis=None) > 0)


def _count_jax_processes() -> int:
    # process_count() makes the devices, which takes most of the GPUs' memory, and TensorFlow and Keras import JAX
    # without using it.
    if "jax" in list_running_frameworks():
        return _call_count("jax", "process_count")
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)  # set by jax.distributed.initialize
    return int(getattr(state, "num_processes", 1))


def _count_torch_workers() -> int:
    distributed = sys.modules.get("torch.distributed")
    is_ready: Callable[[], bool] | None = getattr(distributed, "is_initialized", None)
    return _call_count("torch.distributed", "get_world_size") if is_ready is not None and is_ready() else 1


def _call_count(module: str, function: str) -> int:
    count = getattr(sys.modules.get(module), function, None)
    return 1 if count is None else int(count())
