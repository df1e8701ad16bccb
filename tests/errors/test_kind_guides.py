"""Next steps of errors: by their text where it shows a problem, by their kind otherwise."""

from __future__ import annotations

import pytest

from gpuwarden.errors.kind_guides import describe_error, find_error_guide, find_text_guide
from gpuwarden.protocol.messages import ERROR_KINDS


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


def test_errors_are_described_in_words() -> None:
    """An error has the name of its exception and the words of its kind, never the kind's name with underscores."""
    assert describe_error("device_oom", "ResourceExhaustedError") == "ResourceExhaustedError, out of device memory"
    assert describe_error("other", "ValueError") == "ValueError"
    assert describe_error("of_a_newer_version", "ValueError") == "ValueError, of a newer version"
    assert not any("_" in describe_error(kind, "") for kind in ERROR_KINDS)
