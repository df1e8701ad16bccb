"""Errors of a run record: their causes are judged by the record, not by what the machine has free now."""

from __future__ import annotations

from dataclasses import replace

import pytest
from run_record_cases import example_record

from gpuwarden.errors.explanation import explain_events
from gpuwarden.errors.problems import MOMENT_PREFIX
from gpuwarden.records.record import RunRecord
from gpuwarden.records.run_headline import list_run_events
from snapshots import GIB

PLAIN = replace(example_record(), reported_errors=(), xids=None, nonfinite_loss=None, no_gpu=None)
KILLED = "killed by the kernel's OOM killer: its cgroup was out of memory (kernel log)"


@pytest.mark.parametrize(
    ("record", "problem", "first_cause"),
    [
        pytest.param(
            replace(PLAIN, outcome="out_of_memory", evidence=KILLED, host_memory_peak_bytes=15 * GIB),
            "killed_by_kernel",
            "By its record, its processes used up to 15.0 GiB of host memory.",
            id="killed for memory",
        ),
        pytest.param(
            replace(PLAIN, outcome="out_of_memory", evidence=KILLED, host_memory_peak_bytes=None),
            "killed_by_kernel",
            "The memory limit of the container or batch job is reached.",
            id="killed for memory before its memory was read",
        ),
        pytest.param(
            replace(PLAIN, outcome="failed", reported_errors=example_record().reported_errors),
            "device_out_of_memory",
            "4.00 GiB did not fit next to 9.00 GiB of 11.0 GiB.",
            id="diagnosed",
        ),
    ],
)
def test_a_death_is_judged_by_its_record(record: RunRecord, problem: str, first_cause: str) -> None:
    """The recorded cause comes first, and no cause has a check of the memory that is free now."""
    explanation = explain_events(list(list_run_events(record)))
    assert explanation is not None
    found = explanation.root.problem
    assert (found.name, found.causes[0].text) == (problem, first_cause)
    assert not [name for cause in found.causes for name in cause.checks if name.startswith(MOMENT_PREFIX)]
