"""Trainings whose out-of-memory error has no cause that the daemon can know."""

from __future__ import annotations

from training_run import allocate_tensor, eager_steps, get_device, main, make_watch

from gpuwarden import watch
from labels import training


@training("unknown")
def unknown_refusal(*, cause: bool) -> None:
    """The driver refuses, though memory is free and there is no other process."""
    with make_watch("unknown_refusal") as run:
        eager_steps(run, 4)
        if cause:
            get_device().refuse_all()
        wanted = allocate_tensor(30)
        eager_steps(run, 1)
        del wanted


@training("unknown")
def unknown_device(*, cause: bool) -> None:
    """The GPU is one that the daemon does not have: neither its size nor its processes are known."""
    devices = {"CPU:0": "GPU-00000000-0000-0000-0000-000000000000"}
    with watch("unknown_device", devices=devices, framework="tensorflow") as run:
        eager_steps(run, 4)
        wanted = allocate_tensor(300 if cause else 30)
        eager_steps(run, 1)
        del wanted


if __name__ == "__main__":
    main()
