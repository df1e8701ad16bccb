"""Checks of NVIDIA's driver: kernel module, library and versions."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.doctor.model import CheckResult, CheckRow, Context


def check_module(context: Context) -> Iterator[CheckResult]:
    """Check that the kernel module is loaded."""
    version = context.proc / "driver/nvidia/version"
    if version.exists():
        yield CheckResult("driver.module", "pass", "kernel module nvidia is loaded")
    else:
        yield CheckResult(
            "driver.module",
            "fail",
            "The kernel module nvidia is not loaded.",
            why="Without it no program can use a GPU.",
            fix="sudo modprobe nvidia; if that fails, dmesg has the reason",
        )


DRIVER_CHECKS = (CheckRow(check_module, {"driver.module": "The kernel module is loaded."}),)
