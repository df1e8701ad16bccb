"""Clock event reasons: each label value has its own words."""

from __future__ import annotations

from gpuwarden.gpu.clock_reasons import CLOCK_REASONS, FAULT_REASONS, clock_reason_text
from gpuwarden.nvml.constants import CLOCK_EVENT_REASONS
from gpuwarden.nvml.fields import CLOCK_EVENT_NANOSECONDS


def test_every_reason_has_words() -> None:
    """Each reason that the driver reports or counts has words, and no two have the same."""
    assert CLOCK_REASONS.keys() == CLOCK_EVENT_REASONS.keys() | CLOCK_EVENT_NANOSECONDS.keys()
    assert len(set(CLOCK_REASONS.values())) == len(CLOCK_REASONS)
    assert set(FAULT_REASONS) <= CLOCK_EVENT_REASONS.keys()


def test_reason_of_another_version() -> None:
    """A reason that this version does not know is shown as it is called."""
    assert clock_reason_text("sw_power_cap") == "power limit"
    assert clock_reason_text("edpp_limit") == "edpp limit"
