"""Series that alerts and dashboards join with, made once for all of them."""

from __future__ import annotations

from gpuwarden.alerts.rule import RecordingRule
from gpuwarden.owners.kinds import OWNER_KINDS

_RECORDED = "|".join(kind.name for kind in OWNER_KINDS if kind.recorded)

RULES = (
    # A run may be on a MIG instance, which has a UUID of its own and no name.
    RecordingRule(
        name="gpuwarden:device:info",
        expr="""
            max by (cluster, job, instance, uuid, gpu, name) (
              gpuwarden_gpu_info
              or
              gpuwarden_mig_info * on (cluster, job, instance, gpu_uuid) group_left (gpu, name)
                label_replace(gpuwarden_gpu_info, "gpu_uuid", "$1", "uuid", "(.+)")
            )
        """,
    ),
    # Whoever holds all memory of a device on which there is one run is that run's owner. Where several runs or owners
    # share a device, nobody can tell by these series whose is whose.
    RecordingRule(
        name="gpuwarden:run:owner_info",
        expr="""
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
    ),
    # Who uses a GPU, its MIG instances included, with the names of runs.
    RecordingRule(
        name="gpuwarden:gpu:owner",
        expr=f"""
            sum by (cluster, job, instance, uuid, owner_kind, owner, run_name) (
              gpuwarden_owner_gpu_memory_used_bytes{{owner_kind=~"{_RECORDED}"}}
              or
              label_replace(gpuwarden_owner_gpu_memory_used_bytes{{owner_kind="run"}}, "run_id", "$1", "owner", "(.+)")
                * on (cluster, job, instance, run_id) group_left (run_name) gpuwarden_run_info
            )
        """,
    ),
)
