"""Next steps of errors: by their text where it shows a problem, by their kind otherwise."""

from __future__ import annotations

import pytest

from gpuwarden.errors.kind_guides import find_error_guide, find_text_guide


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("Driver/library version mismatch", "Reboot, or unload and load the NVIDIA kernel modules."),
        ("CUDA error: no kernel image is available", "Install a framework build that lists this GPU's"),
    ],
)
def test_text_decides_the_step(text: str, step: str) -> None:
    """Two errors of one kind have the steps of their own problems."""
    assert find_text_guide("library_mismatch", "RuntimeError", text).next_step.startswith(step)


@pytest.mark.parametrize("text", ["", "unheard of", "CUDA out of memory"])
def test_kind_decides_without_a_text(text: str) -> None:
    """A withheld or unknown text has the step of its kind, and one of another kind does not change it."""
    assert find_text_guide("library_mismatch", "RuntimeError", text) == find_error_guide("library_mismatch")
