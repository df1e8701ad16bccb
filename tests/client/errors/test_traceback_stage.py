"""Stage in which an exception was raised, and the memory of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpuwarden.client.errors.classifier import error_from_exception
from gpuwarden.client.errors.traceback_stage import MAX_FRAMES, find_stage
from gpuwarden.client.keras.model_memory import add_model_memory
from gpuwarden.protocol.messages import Allocation, Error

OOM = "OOM when allocating tensor with shape[4,5] and type float on /device:GPU:0 by allocator GPU_0_bfc"


def raised(file: str, *functions: str) -> BaseException:
    """Raise an out-of-memory from functions of such names in a module at that place."""
    source = "".join(
        f"def {name}():\n    {f'{inner}()' if inner else 'raise MemoryError'}\n"
        for name, inner in zip(functions, (*functions[1:], ""), strict=True)
    )
    names: dict[str, Any] = {}
    exec(compile(source, file, "exec"), names)  # noqa: S102 - source of this test
    try:
        names[functions[0]]()
    except MemoryError as error:
        return error
    raise AssertionError


PLACE = "/venv/lib/python3.12/site-packages/"


@pytest.mark.parametrize(
    ("module", "functions", "stage"),
    [
        ("torch/nn/modules/module.py", ["_call_impl"], "forward"),
        ("torch/nn/modules/module.py", ["to", "convert"], "weights"),
        ("torch/nn/modules/module.py", ["_wrapped_call_impl", "_apply"], "weights"),
        ("torch/optim/adamw.py", ["step", "_init_group"], "optimizer"),
        ("torch/autograd/graph.py", ["_engine_run_backward"], "backward"),
        ("torch/utils/data/dataloader.py", ["__next__"], "input"),
        ("keras/src/layers/layer.py", ["build_wrapper"], "weights"),
        ("keras/src/optimizers/base_optimizer.py", ["build"], "optimizer"),
        ("keras/src/trainers/data_adapters/array_slicing.py", ["slice"], "input"),
        ("tensorflow/python/data/ops/iterator_ops.py", ["__next__"], "input"),
        ("gpuwarden/client/watch.py", ["_pass", "loader"], "input"),
        ("torch/functional.py", ["einsum"], None),
        ("mine/torch/optim/adamw.py", ["step"], None),
    ],
)
def test_stage(module: str, functions: list[str], stage: str | None) -> None:
    """The innermost framework frame that matches decides."""
    assert find_stage(raised(PLACE + module, *functions)) == stage


def test_stage_of_a_program_without_frameworks() -> None:
    """A program's own functions never match, whatever their names; an exception never raised has no stage."""
    assert find_stage(raised("/home/alice/train.py", "forward", "backward")) is None
    assert find_stage(MemoryError()) is None


def test_stage_of_deep_recursion() -> None:
    """The innermost frames of a very long traceback are read."""
    names: dict[str, Any] = {}
    source = "def step(depth):\n    step(depth - 1) if depth else fail()\n"
    exec(compile(source, f"{PLACE}torch/optim/sgd.py", "exec"), names)  # noqa: S102 - source of this test

    def fail(depth: int = MAX_FRAMES) -> None:
        if depth:
            fail(depth - 1)
        raise MemoryError

    names["fail"] = fail
    with pytest.raises(MemoryError) as caught:
        names["step"](3)
    assert find_stage(caught.value) is None


def test_error_has_its_stage() -> None:
    """An out-of-memory is described with it, another error is not."""
    out_of_memory = raised(f"{PLACE}torch/optim/adamw.py", "step")
    assert error_from_exception(out_of_memory, "train", 0).stage == "optimizer"
    other = ValueError("no").with_traceback(out_of_memory.__traceback__)
    assert error_from_exception(other, "train", 0).stage is None


def oom(shape: str | None) -> Error:
    """Make an out-of-memory for a shape."""
    return Error("device_oom", "ResourceExhaustedError", OOM, "train", 3, (Allocation(80, shape),))


def variable(*shape: int | None, dtype: str = "float32") -> Any:
    """Return a stand-in for a framework's variable."""
    return SimpleNamespace(shape=shape, dtype=dtype)


def test_model() -> None:
    """Each variable of model and optimizer counts once by its type's width, in whatever list it is."""
    kernel, half, flag = variable(4, 5), variable(100, dtype="bfloat16"), variable(8, dtype="bool")
    slot = variable(4, 5)
    model = SimpleNamespace(
        variables=[kernel, half, flag],
        trainable_variables=[kernel],
        optimizer=SimpleNamespace(variables=lambda: [slot, kernel, variable(None, 2)]),
    )
    error = add_model_memory(oom("4,5"), model)
    assert (error.weights, error.trainable, error.like_weight) == (80 + 200 + 8 + 80, 80, True)
    assert add_model_memory(oom("20"), model).like_weight is False
    assert add_model_memory(oom(None), model).like_weight is None
    assert add_model_memory(oom("4,5"), SimpleNamespace()) == oom("4,5")
    other = Error("other", "ValueError", "no", "train", 3)
    assert add_model_memory(other, model) == other
