"""Numbers of the NVML field values that gpuwarden reads, as in nvml.h.

Numbers, not nvidia-ml-py's names: older releases lack some. All are below 251, where numbers have kept their meaning.
Above, drivers 570, 580 and 590 use the same numbers for different fields (NVIDIA/k8s-test-infra pull 691 on 251 to 253
and 269 to 271), and an answer does not show which.
"""

from __future__ import annotations

from typing import Final

ALL_LINKS: Final = 0xFFFFFFFF  # the scope that sums NVLink's throughput over the links

ECC_CURRENT, ECC_PENDING = 1, 2
# Errors over all locations, by type and lifetime.
ECC_TOTALS: Final = {
    ("corrected", "volatile"): 3,
    ("uncorrected", "volatile"): 4,
    ("corrected", "aggregate"): 5,
    ("uncorrected", "aggregate"): 6,
}
RETIRED_PAGES: Final = {"single_bit": 29, "double_bit": 30}
RETIRED_PAGES_PENDING = 31

# Nanoseconds spent with clocks held down, by reason: named as in CLOCK_EVENT_REASONS, which has no low utilization.
CLOCK_EVENT_NANOSECONDS: Final = {
    "sw_power_cap": 74,
    "sw_thermal_slowdown": 75,
    "sync_boost": 76,
    "board_limit": 77,
    "low_utilization": 78,
    "reliability": 79,
}

MEMORY_TEMPERATURE = 82
POWER_AVERAGE, POWER_INSTANT = 185, 186
POWER_SCOPES: Final = {"gpu": 0, "module": 1, "memory": 2}
# Temperature margins (see nvmlDeviceGetMarginTemperature) of these thresholds.
MARGIN_THRESHOLDS: Final = {"shutdown": 193, "slowdown": 194, "memory_max_operating": 195, "max_operating": 196}

REMAPPED_ROWS: Final = {"correctable": 142, "uncorrectable": 143}
ROW_REMAP_PENDING, ROW_REMAP_FAILED = 144, 145

PCIE_REPLAYS = 94
PCIE_BYTES: Final = {"transmit": 197, "receive": 198}
PCIE_ERRORS: Final = {
    "l0_to_recovery": 169,
    "correctable": 173,
    "naks_received": 174,
    "receiver_error": 175,
    "bad_tlp": 176,
    "naks_sent": 177,
    "bad_dllp": 178,
    "non_fatal": 179,
    "fatal": 180,
    "unsupported_request": 181,
    "lcrc": 182,
    "lane": 183,
}

NVLINK_COUNT = 91
NVLINK_SPEED = 164  # MB/s, of a link
NVLINK_STATE = 165
NVLINK_KIBIBYTES: Final = {"transmit": 138, "receive": 139}
NVLINK_RAW_KIBIBYTES: Final = (140, 141)  # sent and received, with the overhead of the protocol
NVLINK_BYTES: Final = {"transmit": 202, "receive": 204}  # of a link; Blackwell and newer
NVLINK_ERRORS: Final = {
    "replay": 161,  # these three up to Hopper
    "recovery": 162,
    "crc": 163,
    "malformed_packet": 206,  # these from Blackwell on
    "buffer_overrun": 207,
    "receive": 208,
    "receive_remote": 209,
    "receive_general": 210,
    "local_integrity": 211,
    "transmit_discard": 212,
    "link_recovery": 215,
    "link_recovery_failed": 214,
    "effective": 219,
    "symbol": 221,
}
NVLINK_ERROR_TOTALS: Final = {"crc_flit": 38, "crc_data": 45, "ecc_data": 160}  # over all links, not per link

C2C_COUNT, C2C_STATUS, C2C_SPEED = 170, 171, 172  # the speed in MB/s
C2C_ERRORS: Final = {"interrupt": 231, "replay": 232, "replay_back_to_back": 233}

RESET_REQUIRED, DRAIN_AND_RESET_REQUIRED = 226, 227
RECOVERY_ACTION = 230
