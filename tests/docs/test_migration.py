"""docs/use/dcgm-migration.md names what exists, and which of DCGM's fields do not."""

from __future__ import annotations

import re
from pathlib import Path

from promql import SAMPLES

from gpuwarden.config.schema import OPTIONS
from gpuwarden.dcgm.metrics import DcgmReadings

DOCUMENT = (Path(__file__).parents[2] / "docs" / "use" / "dcgm-migration.md").read_text()
DCGM = {row.name for row in DcgmReadings.rows}
# dcgm-exporter's lists of counters, etc/default-counters.csv and etc/dcp-metrics-included.csv at 99a774b, with what
# stands there commented out as a proposal.
LISTED = {
    *("SM_CLOCK", "MEM_CLOCK", "MEMORY_TEMP", "GPU_TEMP", "POWER_USAGE", "TOTAL_ENERGY_CONSUMPTION"),
    *("PCIE_TX_THROUGHPUT", "PCIE_RX_THROUGHPUT", "PCIE_REPLAY_COUNTER", "GPU_UTIL", "MEM_COPY_UTIL", "ENC_UTIL"),
    *("DEC_UTIL", "XID_ERRORS", "POWER_VIOLATION", "THERMAL_VIOLATION", "SYNC_BOOST_VIOLATION", "FB_FREE", "FB_USED"),
    *("BOARD_LIMIT_VIOLATION", "LOW_UTIL_VIOLATION", "RELIABILITY_VIOLATION", "FB_RESERVED", "ECC_SBE_VOL_TOTAL"),
    *("ECC_DBE_VOL_TOTAL", "ECC_SBE_AGG_TOTAL", "ECC_DBE_AGG_TOTAL", "RETIRED_SBE", "RETIRED_DBE", "RETIRED_PENDING"),
    *("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "NVLINK_REPLAY_ERROR_COUNT_TOTAL"),
    *("NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "NVLINK_BANDWIDTH_TOTAL", "NVLINK_BANDWIDTH_L0", "VGPU_LICENSE_STATUS"),
    *("UNCORRECTABLE_REMAPPED_ROWS", "CORRECTABLE_REMAPPED_ROWS", "ROW_REMAP_FAILURE"),
}
LISTED_PROFILING = {
    *("GR_ENGINE_ACTIVE", "SM_ACTIVE", "SM_OCCUPANCY", "PIPE_TENSOR_ACTIVE", "DRAM_ACTIVE", "PIPE_FP64_ACTIVE"),
    *("PIPE_FP32_ACTIVE", "PIPE_FP16_ACTIVE", "PCIE_TX_BYTES", "PCIE_RX_BYTES"),
}
NOT_COVERED = {
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_L0",
    "DCGM_FI_DEV_VGPU_LICENSE_STATUS",
}


def test_what_dcgm_exporter_lists_is_covered() -> None:
    """Each field of its lists is on the page, or is listed as missing."""
    listed = {f"DCGM_FI_DEV_{name}" for name in LISTED} | {f"DCGM_FI_PROF_{name}" for name in LISTED_PROFILING}
    assert listed - DCGM == NOT_COVERED
    for name in NOT_COVERED - {"DCGM_FI_DEV_NVLINK_BANDWIDTH_L0"}:
        assert name in DOCUMENT
    assert "`DCGM_FI_DEV_NVLINK_…_L0` to `_L17`" in DOCUMENT


def test_what_is_said_to_be_missing_is() -> None:
    """The table of missing names holds none that the page bears."""
    _, _, missing = DOCUMENT.partition("### What is missing")
    rows = re.findall(r"^\| (`.*?) \|", missing.partition("\n## ")[0], re.MULTILINE)
    assert rows
    named = {name for row in rows for name in re.findall(r"DCGM_FI_\w+[A-Z0-9](?![\w…])", row)}
    assert named & DCGM == set()


def test_our_names_are_real() -> None:
    """Each of our metrics that the document names exists, with the label it is shown with."""
    found = re.findall(r"(gpuwarden_\w+)(?:\{(\w+))?", DOCUMENT)
    assert len(found) > 30
    for name, label in found:
        assert name in SAMPLES, name
        assert not label or label in SAMPLES[name], (name, label)


def test_options_are_real() -> None:
    """Every option that the document names exists."""
    named = set(re.findall(r"`((?:poll|web|gpus)\.\w+)", DOCUMENT))
    assert named
    assert named <= OPTIONS.keys()
    assert "compat" in OPTIONS
