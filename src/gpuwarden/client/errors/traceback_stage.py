"""In which part of a program an exception was raised, by the functions of the frameworks in its traceback.

Nothing of the frames is kept, and no local variable of theirs is looked at.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from gpuwarden.protocol.messages import Stage

MOST_FRAMES = 400  # the innermost


@dataclass(frozen=True, slots=True)
class Place:
    """Functions of a framework's module, both regular expressions, that mean a stage."""

    module: str
    function: str
    stage: Stage


# The innermost frame that one of these means counts: weights are often made within the first forward pass.
PLACES = (
    Place(r"keras/(src/)?layers/layer\.py", r"add_weight|build_wrapper", "weights"),
    Place(
        r"keras/(src/)?.*variables?\.py", r"_initialize|_initialize_with_initializer|_deferred_initialize", "weights"
    ),
    Place(r"keras/(src/)?engine/base_layer\.py", r"_maybe_build|add_weight", "weights"),
    Place(
        r"keras/(src/)?(optimizers|backend/\w+/optimizer)", r"build|add_variable\w*|apply\w*|update_step", "optimizer"
    ),
    Place(r"torch/nn/modules/module\.py", r"_apply|to|cuda|load_state_dict", "weights"),
    Place(r"torch/nn/parameter\.py|torch/nn/init\.py", r".*", "weights"),
    Place(r"torch/optim/", r".*", "optimizer"),
    Place(r"torch/autograd/", r"_engine_run_backward|backward|grad", "backward"),
    Place(r"torch/_tensor\.py", r"backward", "backward"),
    Place(r"torch/utils/data/", r".*", "input"),
    Place(r"torch/nn/modules/module\.py", r"_call_impl|_wrapped_call_impl", "forward"),
    Place(r"(optax|flax/training|flax/optim)/", r".*", "optimizer"),
    Place(r"tensorflow/python/data/|keras/(src/)?trainers/data_adapters/", r".*", "input"),
    Place(r"tensorflow/python/eager/backprop\.py", r"gradient|_gradient_function", "backward"),
    Place(r"tensorflow/python/ops/resource_variable_ops\.py", r"_init_from_args|__init__", "weights"),
)
_MODULE = re.compile(r".*(?:site-packages|dist-packages)/(.*)")


def stage_of(exception: BaseException) -> Stage | None:
    """Say in which part of a program it was raised; None where no frame tells."""
    frames: deque[tuple[str, str]] = deque(maxlen=MOST_FRAMES)
    trace = exception.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, code.co_name))
        trace = trace.tb_next
    for file, function in reversed(frames):
        module = _MODULE.match(file.replace("\\", "/"))
        if module is None:
            continue
        for place in PLACES:
            if re.match(place.module, module[1]) and re.fullmatch(place.function, function):
                return place.stage
    return None
