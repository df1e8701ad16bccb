"""Stage of a program in which an exception was raised, from the framework functions in its traceback.

No frame is kept, and no local variable is read.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from gpuwarden.protocol.messages import Stage

MAX_FRAMES = 400  # the innermost


@dataclass(frozen=True, slots=True)
class StagePattern:
    """Module and function of a framework, as regular expressions, that identify a stage."""

    module: str
    function: str
    stage: Stage


# The innermost frame that matches decides: weights are often made within the first forward pass.
STAGE_PATTERNS = (
    StagePattern(r"keras/(src/)?layers/layer\.py", r"add_weight|build_wrapper", "weights"),
    StagePattern(
        r"keras/(src/)?.*variables?\.py", r"_initialize|_initialize_with_initializer|_deferred_initialize", "weights"
    ),
    StagePattern(r"keras/(src/)?engine/base_layer\.py", r"_maybe_build|add_weight", "weights"),
    StagePattern(
        r"keras/(src/)?(optimizers|backend/\w+/optimizer)", r"build|add_variable\w*|apply\w*|update_step", "optimizer"
    ),
    StagePattern(r"torch/nn/modules/module\.py", r"_apply|to|cuda|load_state_dict", "weights"),
    StagePattern(r"torch/nn/parameter\.py|torch/nn/init\.py", r".*", "weights"),
    StagePattern(r"torch/optim/", r".*", "optimizer"),
    StagePattern(r"torch/autograd/", r"_engine_run_backward|backward|grad", "backward"),
    StagePattern(r"torch/_tensor\.py", r"backward", "backward"),
    StagePattern(r"torch/utils/data/", r".*", "input"),
    StagePattern(r"torch/nn/modules/module\.py", r"_call_impl|_wrapped_call_impl", "forward"),
    StagePattern(r"(optax|flax/training|flax/optim)/", r".*", "optimizer"),
    StagePattern(r"tensorflow/python/data/|keras/(src/)?trainers/data_adapters/", r".*", "input"),
    StagePattern(r"gpuwarden/client/watch\.py", r"_pass", "input"),  # the user's loader, in run.batches
    StagePattern(r"tensorflow/python/eager/backprop\.py", r"gradient|_gradient_function", "backward"),
    StagePattern(r"tensorflow/python/ops/resource_variable_ops\.py", r"_init_from_args|__init__", "weights"),
)
_MODULE = re.compile(r".*(?:site-packages/|dist-packages/|/(?=gpuwarden/client/))(.*)")


def find_stage(exception: BaseException) -> Stage | None:
    """Return the stage in which an exception was raised; None if no frame identifies one."""
    frames: deque[tuple[str, str]] = deque(maxlen=MAX_FRAMES)
    trace = exception.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, code.co_name))
        trace = trace.tb_next
    for file, function in reversed(frames):
        module = _MODULE.match(file.replace("\\", "/"))
        if module is None:
            continue
        for place in STAGE_PATTERNS:
            if re.match(place.module, module[1]) and re.fullmatch(place.function, function):
                return place.stage
    return None
