"""Recording rules: series that alerts and dashboards join with, long-term series, and service level indicators.

The rules of a group are expressions by name: level:metric:operation, by the naming convention of Prometheus.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.health.model import UNLESS_UNVERIFIED
from gpuwarden.owners.kinds import OWNER_KINDS
from gpuwarden.usage.gpu_meter import SLOWDOWNS

_RECORDED = "|".join(kind.name for kind in OWNER_KINDS if kind.recorded)

JOIN_RULES: Mapping[str, str] = {
    # A run can be on a MIG instance, which has its own UUID and no name.
    "gpuwarden:device:info": """
        max by (cluster, job, instance, uuid, gpu, name) (
          gpuwarden_gpu_info
          or
          gpuwarden_mig_info * on (cluster, job, instance, gpu_uuid) group_left (gpu, name)
            label_replace(gpuwarden_gpu_info, "gpu_uuid", "$1", "uuid", "(.+)")
        )
    """,
    # The owner of all memory of a device with one run is that run's owner. If several runs or owners share a device,
    # these series do not say which run has which owner.
    "gpuwarden:run:owner_info": """
        group by (cluster, job, instance, run_id, owner_kind, owner) (
          (
            gpuwarden_owner_gpu_memory_used_bytes{owner_kind!="run"}
              == on (cluster, job, instance, uuid) group_left ()
              sum by (cluster, job, instance, uuid) (gpuwarden_owner_gpu_memory_used_bytes{owner_kind="user"})
          )
            * on (cluster, job, instance, uuid) group_left (run_id)
            (
              label_replace(
                gpuwarden_owner_gpu_memory_used_bytes{owner_kind="run"}, "run_id", "$1", "owner", "(.+)"
              )
                and on (cluster, job, instance, uuid)
                count by (cluster, job, instance, uuid) (gpuwarden_owner_gpu_memory_used_bytes{owner_kind="run"})
                  == 1
            )
        )
    """,
    # Users of a GPU, its MIG instances included, with the names of runs.
    "gpuwarden:gpu:owner": f"""
        sum by (cluster, job, instance, uuid, owner_kind, owner, run_name) (
          gpuwarden_owner_gpu_memory_used_bytes{{owner_kind=~"{_RECORDED}"}}
          or
          label_replace(gpuwarden_owner_gpu_memory_used_bytes{{owner_kind="run"}}, "run_id", "$1", "owner", "(.+)")
            * on (cluster, job, instance, run_id) group_left (run_name) gpuwarden_run_info
        )
    """,
}

RUN_MEMORY_RULES: Mapping[str, str] = {
    # Memory that the run uses or can still allocate. Its own growth does not change it; memory taken by others does.
    "gpuwarden:run:memory_within_reach_bytes": """
        gpuwarden_run_memory_headroom_bytes + gpuwarden_run_allocator_memory_bytes
    """,
}


def _device_expr(reading: str) -> str:
    """Return a reading of GPUs and MIG instances, without GPUs in MIG mode, which are the sum of their instances."""
    return f"""
        max by (cluster, job, instance, uuid) (
          gpuwarden_gpu_{reading}
            unless on (cluster, job, instance, uuid)
            label_replace(
              group by (cluster, job, instance, gpu_uuid) (gpuwarden_mig_info), "uuid", "$1", "gpu_uuid", "(.+)"
            )
          or
          gpuwarden_mig_{reading}
        )
    """


DEVICE_MEMORY_RULES: Mapping[str, str] = {
    # In the group of the alerts that use their history: the rules of a group are evaluated in order.
    "gpuwarden:device:memory_used_bytes": _device_expr("memory_used_bytes"),
    "gpuwarden:device:memory_free_bytes": _device_expr("memory_free_bytes"),
}

# Reasons of throttling that can be avoided: the power limit throttles every GPU under high load.
AVOIDABLE_SLOWDOWNS = "|".join(reason for reason in SLOWDOWNS if reason != "sw_power_cap")

_HELD = 'gpuwarden_owner_gpu_memory_used_bytes{owner_kind="user"} > bool 0'


def _holder_sum(what: str) -> str:
    """Return the sum of a number of each GPU by owner of its memory; a shared GPU counts for each of its owners."""
    return f"""
        sum by (cluster, job, instance, owner) (
          ({_HELD})
            * on (cluster, job, instance, uuid) group_left () {what}
        )
    """


FLEET_RULES: Mapping[str, str] = {
    "gpuwarden:box:headroom_ratio:min": f"""
        min by (cluster, job, instance) (
          1 / (1 + gpuwarden_run_allocator_memory_bytes / gpuwarden_run_memory_headroom_bytes)
          {UNLESS_UNVERIFIED}
        )
    """,
    "gpuwarden:box:temperature_margin_celsius:min": """
        min by (cluster, job, instance) (gpuwarden_gpu_temperature_margin_celsius)
    """,
    "gpuwarden:box:utilization_ratio:avg": "avg by (cluster, job, instance) (gpuwarden_gpu_utilization_ratio)",
    "gpuwarden:box:power_usage_watts:sum": "sum by (cluster, job, instance) (gpuwarden_gpu_power_usage_watts)",
    "gpuwarden:box:gpus_lost:sum": "sum by (cluster, job, instance) (1 - gpuwarden_gpu_up)",
    "gpuwarden:box:gpus:count": "count by (cluster, job, instance) (gpuwarden_gpu_up)",
    "gpuwarden:box:memory_used_ratio:avg": """
        sum by (cluster, job, instance) (gpuwarden_gpu_memory_used_bytes)
          / sum by (cluster, job, instance) (gpuwarden_gpu_memory_size_bytes)
    """,
    "gpuwarden:box:runs:sum": "sum by (cluster, job, instance) (gpuwarden_run_up)",
    "gpuwarden:box:runs_stalled:sum": "sum by (cluster, job, instance) (gpuwarden_run_stalled)",
    "gpuwarden:box:seconds_to_oom:min": "min by (cluster, job, instance) (gpuwarden_run_seconds_to_oom)",
    "gpuwarden:box:runs_ended_total:sum": "sum by (cluster, job, instance, outcome) (gpuwarden_runs_ended_total)",
    "gpuwarden:box:alerts:count": """
        count by (cluster, job, instance, severity) (ALERTS{alertstate="firing", job="%{job}"})
    """,
    "gpuwarden:owner:gpus_held:sum": f"sum by (cluster, job, instance, owner) ({_HELD})",
    "gpuwarden:owner:gpus_idle:sum": _holder_sum("(1 - gpuwarden_gpu_utilization_ratio)"),
    "gpuwarden:owner:power_usage_watts:sum": _holder_sum("gpuwarden_gpu_power_usage_watts"),
    # Share of the time throttled, of the most frequent reason, over the window of the alerts.
    "gpuwarden:gpu:slowed_ratio:max": f"""
        max by (cluster, job, instance, uuid) (
          rate(
            gpuwarden_gpu_clock_event_seconds_total{{
              reason=~"{AVOIDABLE_SLOWDOWNS}"
            }}[%{{slowed_window}}]
          )
        )
    """,
    # Evaluated last, and also for hosts without GPUs: where dashboards find it, all other recorded series exist.
    "gpuwarden:box:build_info:group": "group by (cluster, job, instance) (gpuwarden_build_info)",
}

# Service level indicators, of recorded series only: of all samples of a day they would cost too much.
OBJECTIVE_RULES: Mapping[str, str] = {
    # A host that went down still counts for a day, with all its GPUs.
    "gpuwarden:cluster:gpus_up:ratio": """
        sum by (cluster, job) (gpuwarden:box:gpus:count - gpuwarden:box:gpus_lost:sum)
          / sum by (cluster, job) (last_over_time(gpuwarden:box:gpus:count[1d]))
    """,
    # Killed runs are left out, as people end runs too; so are those with an unknown end.
    "gpuwarden:cluster:runs_finished:ratio_1d": """
        sum by (cluster, job) (increase(gpuwarden:box:runs_ended_total:sum{outcome="finished"}[1d]))
          / sum by (cluster, job) (increase(gpuwarden:box:runs_ended_total:sum{outcome!~"killed|unknown"}[1d]))
    """,
}
