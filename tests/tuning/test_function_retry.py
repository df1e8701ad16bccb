"""`with_oom_retry` around loops with real out-of-memories."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_limit import memory_limit
from training_cases import ON_THE_CPU, run_cases

from gpuwarden import with_oom_retry
from system_parts import skip_without

FITS = 8


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Leave what pytest has loaded out of the collections of garbage that a retry makes: each would take 0.2 s."""
    gc.freeze()
    yield
    gc.unfreeze()


def allocate(batch_size: int) -> int:
    """Ask NumPy for more memory than any machine has, if the batch size is larger than FITS."""
    if batch_size > FITS:
        np.ones((1 << 22, 1 << 22))
    return batch_size


@pytest.mark.frameworks
@pytest.mark.parametrize("framework", ["tensorflow", "torch", "jax"])
def test_frameworks(framework: str, tmp_path: Path) -> None:
    """A loop that runs out of memory ends as one that had the last batch size from the start; each retry counts."""
    skip_without(framework)
    case = run_cases("function_retry_cases.py", tmp_path, framework, **memory_limit(64), **ON_THE_CPU)[framework]
    assert "raised" not in case, case["raised"]
    result, sizes = case["result"], case["result"]["sizes"]
    assert len(sizes) > 1
    assert sizes == [sizes[0] >> index for index in range(len(sizes))]
    assert result["equal"]
    assert result["retries"] == len(sizes) - 1 == len(case["logged"])
    assert case["logged"][0].endswith(f"batch_size={sizes[0]} new_batch_size={sizes[1]}")


IDLE = """
import jax, numpy as np
from gpuwarden import with_oom_retry
@with_oom_retry(batch_size=2)
def train(batch_size):
    return batch_size if batch_size == 1 else np.ones((1 << 22, 1 << 22))
print(train(), bool(jax._src.xla_bridge._backends))
"""


@pytest.mark.frameworks
def test_framework_that_only_was_imported() -> None:
    """A retry sets up no devices of a framework that the program has imported and not used."""
    skip_without("jax")
    done = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1", "False"], done.stderr


def test_later_calls() -> None:
    """The size that fitted is that of later calls; arguments and results pass unchanged, of a method too."""

    class Trainer:
        sizes: list[int] = []  # noqa: RUF012 - one trainer

        @with_oom_retry(batch_size=32)
        def train(self, name: str, *, batch_size: int, epochs: int = 1) -> tuple[str, int, int]:
            """Train."""
            self.sizes.append(batch_size)
            return name, epochs, allocate(batch_size)

    trainer = Trainer()
    assert trainer.train("a", epochs=3) == ("a", 3, FITS)
    assert trainer.train("b") == ("b", 1, FITS)
    assert trainer.sizes == [32, 16, 8, 8]
    assert (Trainer.train.__name__, Trainer.train.__doc__) == ("train", "Train.")


class _Training:
    def __call__(self, batch_size: int) -> int:
        """Train."""
        return allocate(batch_size)


@pytest.mark.parametrize("function", [functools.partial(allocate), _Training(), _Training().__call__])
def test_functions_without_a_name(function: Callable[[int], int]) -> None:
    """Anything that can be called is retried, and named in the log by what it is."""
    assert with_oom_retry(batch_size=32)(function)() == FITS


def test_threads() -> None:
    """Calls that fail at once with the same size halve it once."""
    all_begun = threading.Barrier(4)

    @with_oom_retry(batch_size=2 * FITS)
    def train(batch_size: int) -> int:
        if batch_size > FITS:
            all_begun.wait(60)
        return allocate(batch_size)

    with ThreadPoolExecutor(4) as pool:
        assert [each.result() for each in [pool.submit(train) for _ in range(4)]] == [FITS] * 4


def test_smallest() -> None:
    """Below the smallest size the out-of-memory is raised, with a note."""
    sizes = []

    @with_oom_retry(100, smallest=30)
    def train(batch_size: int) -> None:
        sizes.append(batch_size)
        allocate(batch_size)

    with pytest.raises(MemoryError) as caught:
        train()
    assert sizes == [100, 50]
    notes = getattr(caught.value, "__notes__", None)
    assert notes in (None, ["with_oom_retry: out of memory with batch size 50, the smallest allowed"])
    assert "allocate" in [each.name for each in caught.traceback]


def test_restore() -> None:
    """The state is restored before each retry; where that fails, the out-of-memory is raised from the failure."""
    restored = []

    @with_oom_retry(batch_size=32, restore=lambda: restored.append(1))
    def train(batch_size: int) -> int:
        return allocate(batch_size)

    assert (train(), len(restored)) == (FITS, 2)

    def fail() -> None:
        raise FileNotFoundError("no checkpoint")

    @with_oom_retry(batch_size=32, restore=fail)
    def train_on(batch_size: int) -> int:
        return allocate(batch_size)

    with pytest.raises(MemoryError) as caught:
        train_on()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_memory_is_freed() -> None:
    """Local variables of the failed call are freed before the next begins."""

    class Block:
        alive = 0

        def __init__(self) -> None:
            Block.alive += 1
            self.itself = self  # only the collector frees it

        def __del__(self) -> None:
            Block.alive -= 1

    found = []

    @with_oom_retry(batch_size=32)
    def train(batch_size: int) -> int:
        found.append(Block.alive)
        block = Block()
        return allocate(batch_size) if block.alive else 0

    train()
    assert found == [0, 0, 0]


@pytest.mark.parametrize("error", [ValueError("shapes (3,) and (4,) not aligned"), KeyboardInterrupt()])
def test_other_errors(error: BaseException) -> None:
    """Any other error is raised at once."""
    sizes = []

    @with_oom_retry(batch_size=32)
    def train(batch_size: int) -> None:
        sizes.append(batch_size)
        raise error

    with pytest.raises(type(error)) as caught:
        train()
    assert caught.value is error
    assert sizes == [32]


def test_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several workers is refused: each would choose its own size."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one of 2 workers"):
        with_oom_retry(batch_size=32)(allocate)()


_METHOD: Any = classmethod(lambda _cls, batch_size: batch_size)


async def _coroutine(batch_size: int) -> None: ...


async def _generator(batch_size: int) -> AsyncIterator[int]:
    yield batch_size


def _iterate(batch_size: int) -> Iterator[int]:
    yield batch_size


class _AsyncTrainer:
    async def __call__(self, batch_size: int) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: with_oom_retry(batch_size=0), "batch_size: 0 is too small"),
        (lambda: with_oom_retry(allocate), "batch_size: <function allocate at .*> is not a whole number"),  # type: ignore[arg-type] # the error
        (lambda: with_oom_retry(4)(_METHOD), "classmethod is not a function; write @classmethod above it"),
        (lambda: with_oom_retry(batch_size=True), "batch_size: True is not a whole number"),
        (lambda: with_oom_retry(batch_size=4, smallest=8), "batch_size: 4 is less than smallest"),
        (lambda: with_oom_retry(batch_size=4, restore=3), "restore: int is not a function"),  # type: ignore[arg-type] # the error
        (lambda: with_oom_retry(batch_size=4)(lambda: 1), "has no argument batch_size"),
        (lambda: with_oom_retry(batch_size=4)(lambda batch_size, /: batch_size), "has no argument batch_size"),
        (lambda: with_oom_retry(batch_size=4)(functools.partial(_iterate)), "partial is a coroutine or a generator"),
        (lambda: with_oom_retry(batch_size=4)(_coroutine), "runs after its call"),
        (lambda: with_oom_retry(batch_size=4)(_generator), "runs after its call"),
        (lambda: with_oom_retry(batch_size=4)(_iterate), "runs after its call"),
        (lambda: with_oom_retry(batch_size=4)(_AsyncTrainer()), "_AsyncTrainer is a coroutine"),
        (lambda: with_oom_retry(batch_size=4)(allocate)(batch_size=4), "batch_size: with_oom_retry chooses it"),
    ],
)
def test_arguments(wrong: Callable[[], Any], text: str) -> None:
    """A wrong argument is refused, with what to do."""
    with pytest.raises((TypeError, ValueError), match=text):
        wrong()
