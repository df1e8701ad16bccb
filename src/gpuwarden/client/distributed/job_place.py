"""Place of this process in its job: the job's name, its rank and the world size, from the environment.

Launchers set these variables. No framework and no network is used: the place has to be known before either is set up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuwarden.protocol.validators import MAX_COUNT, clip

# TensorFlow's names for the workers that train together; a cluster's ps and evaluator do not count.
_TRAINING = ("chief", "master", "worker")

# Rank and world size as launchers name them: torchrun and compatible ones, mpirun of Open MPI and of MPICH, srun. The
# launcher of the training process comes before those that may have started the launcher. For Slurm the count is srun's:
# SLURM_PROCID and SLURM_NTASKS are set in a batch script too, which is one process.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Place of a process: the name that all processes of the job share, and its rank, from 0; None if unknown."""

    job: str | None = None
    rank: int | None = None
    world_size: int | None = None


def read_job_place(environ: Mapping[str, str]) -> JobPlace:
    """Read the place from the environment. Never raises, whatever the variables contain."""
    cluster, kind, index = _read_tf_config(environ)
    job = _read_job_name(environ) or (_hash_cluster(cluster) if cluster else _read_meeting_point(environ))
    rank, world_size = _find_rank(cluster, kind, index) if cluster else _read_launcher(environ)
    return JobPlace(None if job is None else clip(job), rank, world_size)


def _read_job_name(environ: Mapping[str, str]) -> str | None:
    """Return the name that a scheduler or launcher gave the job."""
    # torchrun's run id is "none" unless one was given.
    run_id = environ.get("TORCHELASTIC_RUN_ID", "none")
    return (
        environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOB_NAME") or (None if run_id == "none" else run_id) or None
    )


def _read_meeting_point(environ: Mapping[str, str]) -> str | None:
    """Return a name for workers whose job has none: mpirun's namespace, or the address where they meet."""
    if environ.get("PMIX_NAMESPACE"):
        return environ["PMIX_NAMESPACE"]
    address = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return ":".join(filter(None, address)) if all(address) else None


def _read_launcher(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    for rank, world_size in _LAUNCHERS:
        found, size = _parse_count(environ.get(rank)), _parse_count(environ.get(world_size))
        if found is None or (rank == "SLURM_PROCID" and size is None):
            continue
        return found, size if size is not None and size > found else None
    return None, None


def _read_tf_config(environ: Mapping[str, str]) -> tuple[dict[str, list[Any]], str, int | None]:
    """Read TF_CONFIG: the cluster's addresses by kind of task, and this task's kind and index. Empty if not set."""
    try:
        config = json.loads(environ.get("TF_CONFIG") or "{}")
        cluster = {str(kind): list(addresses) for kind, addresses in config["cluster"].items()}
        return cluster, str(config["task"]["type"]), _parse_count(str(config["task"]["index"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, "", None


def _hash_cluster(cluster: Mapping[str, Any]) -> str:
    """Return a short name that is the same in every worker: a hash of the cluster's addresses, which they share."""
    return "cluster-" + hashlib.sha256(json.dumps(cluster, sort_keys=True).encode()).hexdigest()[:12]


def _find_rank(cluster: Mapping[str, list[Any]], kind: str, index: int | None) -> tuple[int | None, int | None]:
    """Count the chief before the workers, as TensorFlow's multi-worker strategies do."""
    if index is None or kind not in _TRAINING or index >= len(cluster.get(kind, ())):
        return None, None
    before = sum(len(cluster.get(earlier, ())) for earlier in _TRAINING[: _TRAINING.index(kind)])
    return before + index, sum(len(cluster.get(each, ())) for each in _TRAINING)


def _parse_count(text: str | None) -> int | None:
    # Not int() alone: it takes "1_0" and digits of other scripts.
    if not (text and text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_COUNT))):
        return None
    value = int(text)
    return value if value < MAX_COUNT else None
