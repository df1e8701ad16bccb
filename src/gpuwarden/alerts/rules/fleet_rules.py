"""Series that dashboards read of days and weeks, in place of what all GPUs and runs of a fleet told meanwhile."""

from __future__ import annotations

from gpuwarden.alerts.rule import RecordingRule
from gpuwarden.usage.gpu_meter import SLOWDOWNS

# What slows a GPU down and should not: the power limit holds every GPU that works hard.
AVOIDABLE_SLOWDOWNS = "|".join(reason for reason in SLOWDOWNS if reason != "sw_power_cap")

_HELD = 'gpuwarden_owner_gpu_memory_used_bytes{owner_kind="user"} > bool 0'


def _of_held(what: str) -> str:
    """Sum a number of each GPU up by those who hold memory on it; one that two share counts for both."""
    return f"""
        sum by (cluster, job, instance, owner) (
          ({_HELD})
            * on (cluster, job, instance, uuid) group_left () {what}
        )
    """


RULES = (
    RecordingRule(
        name="gpuwarden:box:headroom_ratio:min",
        expr="""
            min by (cluster, job, instance) (
              1 / (1 + gpuwarden_run_allocator_memory_bytes / gpuwarden_run_memory_headroom_bytes)
            )
        """,
    ),
    RecordingRule(
        name="gpuwarden:box:temperature_margin_celsius:min",
        expr="min by (cluster, job, instance) (gpuwarden_gpu_temperature_margin_celsius)",
    ),
    RecordingRule(
        name="gpuwarden:box:utilization_ratio:avg",
        expr="avg by (cluster, job, instance) (gpuwarden_gpu_utilization_ratio)",
    ),
    RecordingRule(
        name="gpuwarden:box:power_usage_watts:sum",
        expr="sum by (cluster, job, instance) (gpuwarden_gpu_power_usage_watts)",
    ),
    RecordingRule(
        name="gpuwarden:box:gpus_lost:sum",
        expr="sum by (cluster, job, instance) (1 - gpuwarden_gpu_up)",
    ),
    RecordingRule(
        name="gpuwarden:owner:gpus_held:sum",
        expr=f"sum by (cluster, job, instance, owner) ({_HELD})",
    ),
    RecordingRule(
        name="gpuwarden:owner:gpus_idle:sum",
        expr=_of_held("(1 - gpuwarden_gpu_utilization_ratio)"),
    ),
    RecordingRule(
        name="gpuwarden:owner:power_usage_watts:sum",
        expr=_of_held("gpuwarden_gpu_power_usage_watts"),
    ),
    # Of the reasons the one that holds most; the part of the time, over as long as alerts take it.
    RecordingRule(
        name="gpuwarden:gpu:slowed_ratio:max",
        expr=f"""
            max by (cluster, job, instance, uuid) (
              rate(
                gpuwarden_gpu_clock_event_seconds_total{{
                  reason=~"{AVOIDABLE_SLOWDOWNS}"
                }}[%{{slowed_window}}]
              )
            )
        """,
    ),
    # The last, and of a box without GPUs too: where dashboards find it, there is what the box told of all the others.
    RecordingRule(
        name="gpuwarden:box:build_info:group",
        expr="group by (cluster, job, instance) (gpuwarden_build_info)",
    ),
)
