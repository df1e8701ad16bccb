"""Every error message that somebody met (error_messages/) is told as what it was, with what it says of allocations."""

from __future__ import annotations

import pytest

from error_messages import Sample, facts, samples
from gpuwarden.protocol import ERROR_KINDS, decode, encode

SAMPLES = list(samples())


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.source[-40:])
def test_message(sample: Sample) -> None:
    """The kind is the one that its thread shows, and each fact of an allocation the one that its text states."""
    error = sample.described()
    assert error.kind == sample.kind
    assert [(fact, told) for fact, _, told in facts(sample)] == [(fact, stated) for fact, stated, _ in facts(sample)]
    assert decode(encode(error)) == error


def test_every_kind_is_met() -> None:
    """No kind rests on what its patterns' author thought up."""
    assert {sample.kind for sample in SAMPLES} == set(ERROR_KINDS)
