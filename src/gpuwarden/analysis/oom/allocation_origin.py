"""Origin of a failed allocation: signs that it belongs to the model, or that it grows with the batch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuwarden.analysis.oom.context import FailureContext
from gpuwarden.formatting import format_bytes

MAX_KERNEL_SIDE = 11  # of a convolution's weights
MAX_WEIGHTS_TIMES = 2  # above this a request for a whole program contains more than gradients

_ACTIVATION = re.compile(
    r"(?:^|[/_])(?:Relu|Elu|Gelu|Selu|Softmax|Sigmoid|Tanh|BiasAdd|MaxPool|AvgPool|Dropout|FusedBatchNorm)\w*$"
)
_LAYER_CALL = re.compile(r"Arguments received by [\w.]+\.call\(\)")  # as Keras ends an error within a layer's call
_CREATION = re.compile(r"Fill|\w*(?:Random|Truncated)\w*")  # TensorFlow's operations that fill a new tensor
# As Keras names an optimizer's operations in a graph.
_OPTIMIZER = re.compile(
    r"(?:ada\w*|sgd|rmsprop|nadam|ftrl|lion|lamb|muon|loss_scale_optimizer)(?:_\d+)?/", re.IGNORECASE
)


def find_weights_sign(failure: FailureContext) -> str | None:
    """Return the sign that the allocation belongs to the model, not to a batch; None without one."""
    error, shape = failure.error, failure.shape
    if error.stage == "weights":
        return "for the model's weights"
    if error.stage == "optimizer" or (failure.allocation and _OPTIMIZER.match(failure.allocation.op or "")):
        return "for the optimizer"
    if error.like_weight:
        return "with the shape of a weight"
    is_created = failure.is_eager and bool(failure.allocation and _CREATION.fullmatch(failure.allocation.op or ""))
    if not error.steps and error.stage is None and (error.phase == "idle" or is_created):
        return "before any training"
    is_unknown = find_shape_batch(failure) is None and error.like_weight is None
    if not error.steps and shape and is_unknown and _is_like_kernel(shape):
        return "with the shape of a convolution's weights"
    return None


def find_batch_sign(failure: FailureContext) -> str | None:
    """Return the strongest sign that the allocation grows with the batch; None without one.

    None also if the stage or the phase shows that it was for something else.
    """
    stage = failure.error.stage
    if stage in ("weights", "optimizer", "input") or (stage is None and failure.error.phase == "idle"):
        return None
    return next(_batch_signs(failure), None)


def _batch_signs(failure: FailureContext) -> Iterator[str]:
    error, shape, requested, base = failure.error, failure.shape, failure.requested, failure.base
    peak = failure.training_peak
    if failure.fit_steps and not failure.is_outsized and peak is not None:
        yield f"came in a step like the {failure.fit_steps} before, which barely fitted with {format_bytes(peak)},"
    if batch := find_shape_batch(failure):
        yield f"grows with the batch size ({batch})"
    if error.like_weight:  # a gradient, in a step whose activations used most of the memory
        yield "came on top of the batch's activations"
    if error.like_weight is False and len(shape) > 1:
        yield "has a shape that no weight has, so it grows with the batch,"
    if len(shape) > 3 and not _is_like_kernel(shape):  # noqa: PLR2004 - examples, two sides, channels
        yield "has the shape of a batch of images"
    if error.stage in ("forward", "backward"):
        yield f"was requested in the {error.stage} pass"
    if is_layer_output(failure):
        yield "is a layer's output, which grows with the batch,"
    if requested is not None and error.weights and requested > MAX_WEIGHTS_TIMES * error.weights:
        yield (
            f"is more than {MAX_WEIGHTS_TIMES} times all weights ({format_bytes(error.weights)}), so it grows with the "
            "batch,"
        )
    # The first XLA program, with nothing in use before, may be the one that makes the weights.
    if requested is not None and base is not None and requested > base and (base or shape) and not failure.is_eager:
        yield f"is more than all memory in use between steps ({format_bytes(base)}), so it grows with the batch,"


def is_layer_output(failure: FailureContext) -> bool:
    """Return True if the operation is a layer's, or the error was raised within a layer's call."""
    op = (failure.allocation.op if failure.allocation else None) or ""
    return bool(_ACTIVATION.search(op) or (_LAYER_CALL.search(failure.error.text) and not _CREATION.fullmatch(op)))


def find_shape_batch(failure: FailureContext) -> int | None:
    """Return the batch size that is, or divides, the first dimension of the tensor; None where it has none."""
    shape, batch, like_weight = failure.shape, failure.batch_size, failure.error.like_weight
    if not shape or like_weight or failure.error.stage in ("weights", "optimizer"):
        return None
    if batch and shape[0] == batch:
        return batch
    if like_weight is False and shape[0] == 1 and len(shape) > 1:
        return 1
    is_multiple = batch is not None and batch > 1 and shape[0] % batch == 0
    return batch if like_weight is False and is_multiple else None


def _is_like_kernel(shape: tuple[int, ...]) -> bool:
    """Return True where a shape looks like that of a convolution's weights: small sides first."""
    return len(shape) >= 3 and max(shape[:-2]) <= MAX_KERNEL_SIDE  # noqa: PLR2004 - sides, and channels in and out
