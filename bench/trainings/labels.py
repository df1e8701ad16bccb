"""Labels of the trainings: each function of a cause's module is a training, and `@training` is its label.

The label of an out-of-memory error is a cause, which can be tested: without the cause and with all else equal, the
training passes, or, if it is too big, still fails (`python bench/accuracy.py --verify`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getdoc, signature
from typing import Any, Literal, get_args

Cause = Literal[
    "too_big", "batch_too_large", "leak", "fragmentation", "co_tenant", "phase_peak", "host_input", "unknown"
]
CAUSES: tuple[Cause, ...] = get_args(Cause)

# Patterns of what the next step of a diagnosis advises.
BATCH = r"batch"
MODEL = r"model|optimizer|precision|layers"
KEEP = r"keep|kept|list|grow"
PARTS = BATCH + r"|parts|pieces|fewer|chunk"
SMALLER_BATCH = r"(smaller|lower|reduce|halve)\W+(the |your )?batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training process on a device of `size` MiB.

    `cause` is the label of its out-of-memory error, None: it has none. `grows` says where memory leaks. `limit` is the
    allocator's own, in MiB, `host_limit` the container's. `co_tenant` are the pieces, MEBIBYTES:SECONDS, that another
    process allocates, once the training has started or, `co_tenant_first`, before. `pace` is the daemon's and the
    callback's. One that `exits_at_once` skips Python's own end, which its broken allocator would not survive.
    `advises` and `never` are patterns that the diagnosis' next step has and has not.
    """

    run: Callable[..., None]
    cause: Cause | None = None
    grows: Literal["device", "host"] | None = None
    size: int = 256
    limit: int | None = None
    host_limit: int | None = None
    co_tenant: tuple[str, ...] = ()
    co_tenant_first: bool = False
    pace: Literal["fast", "default"] = "fast"
    exits_at_once: bool = False
    advises: str = ""
    never: str = r"(?!)"

    @property
    def name(self) -> str:
        """Name of its function."""
        return self.run.__name__

    @property
    def module(self) -> str:
        """Name of the module that has it, which is a program."""
        return self.run.__code__.co_filename.rpartition("/")[2].removesuffix(".py")

    @property
    def why(self) -> str:
        """First line of its docstring."""
        return (getdoc(self.run) or "").partition("\n")[0]

    def start(self, *, cause: bool) -> None:
        """Run it in this process."""
        self.run(**({"cause": cause} if "cause" in signature(self.run).parameters else {}))


TRAININGS: dict[str, Training] = {}


def training(cause: Cause | None = None, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator that labels a training."""

    def label(run: Callable[..., None]) -> Callable[..., None]:
        made = Training(run=run, cause=cause, **settings)
        TRAININGS[made.name] = made
        return run

    return label
