"""docs/engineering/coverage.md is whole: every row of ours, every field that others can show."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

import pytest
from peer_fields import DCGM_COUNTERS, DCGM_FIELDS, GPUD_COMPONENTS, NVML_METRICS, QUERY_FIELDS

from gpuwarden.daemon.metrics_page import TABLES
from gpuwarden.gpu.metrics import GpuReadings

DOCUMENT = (Path(__file__).parents[2] / "docs" / "engineering" / "coverage.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([^`]+)`", DOCUMENT)
OURS = {row.name for table in TABLES for row in table.rows}


def spelt_out(name: str) -> list[str]:
    """Write out the alternatives in braces."""
    parts = [part.split(",") for part in re.split(r"[{}]", name)]
    odd_ones_are_in_braces = [parts[i] if i % 2 else [",".join(parts[i])] for i in range(len(parts))]
    return ["".join(combination) for combination in product(*odd_ones_are_in_braces)]


THEIRS = [name for named in NAMED if not named.startswith(("gpuwarden_", "*")) for name in spelt_out(named)]


def test_every_name_of_ours_exists() -> None:
    """Each named metric is in the tables."""
    assert {name for name in NAMED if name.startswith("gpuwarden_")} <= OURS


def test_every_reading_of_a_gpu_is_there() -> None:
    """Each row of the table is in the comparison."""
    assert {row.name for row in GpuReadings.rows} <= set(NAMED)


@pytest.mark.parametrize("fields", [DCGM_COUNTERS, DCGM_FIELDS, QUERY_FIELDS, NVML_METRICS, GPUD_COMPONENTS])
def test_every_field_of_others_is_answered(fields: list[str]) -> None:
    """Everything that others can show is listed with ours, or among what is left out with its reason."""
    assert [field for field in fields if not any(fnmatchcase(field, name) for name in THEIRS)] == []


def test_every_name_of_theirs_is_theirs() -> None:
    """Each name stands for one of theirs."""
    fields = [*DCGM_COUNTERS, *DCGM_FIELDS, *QUERY_FIELDS, *NVML_METRICS, *GPUD_COMPONENTS]
    commands = {"*", "lspci -s", "nvidia-smi topo -m", "nvidia-smi conf-compute"}
    assert [name for name in THEIRS if name not in commands and not any(fnmatchcase(f, name) for f in fields)] == []
