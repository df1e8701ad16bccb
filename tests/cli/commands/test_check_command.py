"""Command `gpuwarden check`: the GPUs that it asks about."""

from __future__ import annotations

from argparse import Namespace

import pytest

from gpuwarden.cli.commands.check_command import UNKNOWN, question_from_flags
from gpuwarden.cli.main import main


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ("0, 2-3", ["0", "2", "3"]),
        ("GPU-5130,MIG-7", ["GPU-5130", "MIG-7"]),
        ("1,-1,2", ["1"]),
        ("NoDevFiles", []),
        ("", []),
    ],
)
def test_gpus(gpus: str, expected: list[str]) -> None:
    """A list means the same as an option and as a variable of the job."""
    option = Namespace(stage="none", off=[], gpus=gpus)
    assert question_from_flags(option, {})["gpus"] == expected
    job = Namespace(stage="preflight", off=[], gpus=None)
    assert question_from_flags(job, {"CUDA_VISIBLE_DEVICES": gpus})["gpus"] == expected


@pytest.mark.parametrize(("gpus", "name"), [("0,all", "all"), ("3-2", "3-2"), (",", ""), ("0,,1", "")])
def test_what_is_not_a_gpu(gpus: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake in the list makes no node unfit, which would drain it, nor fit."""
    assert main(["check", "--gpus", gpus]) == UNKNOWN
    assert capsys.readouterr().err == f"unknown: '{name}' is not a GPU; write UUIDs or indexes, such as 0,2-3\n"
