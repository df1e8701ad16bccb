"""Place of a process in its job, from environments as launchers set them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.client.distributed.job_place import JobPlace, read_job_place

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}

SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "x"}


def tf_config(kind: str, index: int, cluster: object = CLUSTER) -> dict[str, str]:
    """Write TF_CONFIG as its user would."""
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, JobPlace()),
        ({"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "llama"}, JobPlace("llama", 3, 8)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "h", "MASTER_PORT": "29500"},
            JobPlace("h:29500", 1, 2),
        ),
        # srun in a script of sbatch -n 32
        (SLURM | {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "16", "SLURM_NTASKS": "16"}, JobPlace("77", 5, 16)),
        # The script itself
        (SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "32"}, JobPlace("77")),
        ({"SLURM_JOB_NAME": "bash"}, JobPlace("bash")),
        # torchrun under srun: one task a node, eight workers each
        (
            SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "RANK": "9", "WORLD_SIZE": "16"},
            JobPlace("77", 9, 16),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "prterun-h-1@1"},
            JobPlace("prterun-h-1@1", 0, 4),
        ),
        ({"RANK": "4", "WORLD_SIZE": "4"}, JobPlace(None, 4, None)),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, JobPlace()),
        ({"RANK": "٣"}, JobPlace()),
        ({"RANK": "9" * 40}, JobPlace()),
        ({"SLURM_JOB_ID": "7\n8"}, JobPlace("7 8")),
    ],
)
def test_launchers(environ: dict[str, str], expected: JobPlace) -> None:
    """Each launcher's variables give job and rank; senseless ones give nothing."""
    assert read_job_place(environ) == expected


@pytest.mark.parametrize(
    ("kind", "index", "rank"),
    [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2), ("worker", 2, None), ("ps", 0, None), ("evaluator", 0, None)],
)
def test_cluster(kind: str, index: int, rank: int | None) -> None:
    """A chief is rank 0 and the workers follow; who does not train has no rank, and all have one job."""
    found = read_job_place(tf_config(kind, index))
    assert (found.rank, found.world_size) == (rank, None if rank is None else 3)
    assert found.job == read_job_place(tf_config("chief", 0)).job


def test_other_cluster() -> None:
    """Another cluster is another job."""
    assert read_job_place(tf_config("worker", 0, {"worker": ["b:1"]})).job != read_job_place(tf_config("worker", 0)).job


def test_cluster_in_slurm() -> None:
    """The scheduler's name for the job goes before a hash, and the cluster's rank before the scheduler's."""
    slurm = SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert read_job_place(slurm | tf_config("worker", 1)) == JobPlace("77", 2, 3)


@given(
    st.text()
    | st.recursive(st.none() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)).map(
        json.dumps
    )
)
def test_anything(config: str) -> None:
    """No content of TF_CONFIG raises."""
    assert read_job_place({"TF_CONFIG": config}).world_size is None
