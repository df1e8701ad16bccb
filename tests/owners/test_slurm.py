"""Assignment of GPUs to jobs, from the files of a site's prolog."""

from __future__ import annotations

import os
from pathlib import Path

from gpuwarden.gpu.snapshot import GpuProcess
from gpuwarden.owners.slurm import MAX_JOBS, GpuJobs, SlurmJob, SlurmJobMaps
from snapshots import gpu, mig_gpu

GPUS = [gpu(index) for index in range(3)]


def write(path: Path, text: str) -> None:
    """Write a file over the old one, as a prolog does."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def whole(*jobs: SlurmJob) -> GpuJobs:
    """Return the jobs of an undivided GPU."""
    return GpuJobs(jobs, jobs)


def test_job_map_by_index(tmp_path: Path) -> None:
    """A file is named by the GPU's index and has one job per line."""
    maps = SlurmJobMaps(tmp_path, None)
    assert maps.read_jobs(GPUS) == {}
    write(tmp_path / "0", "4711\n")
    write(tmp_path / "1", "12\n13\n\n")
    write(tmp_path / "9", "1\n")
    write(tmp_path / "README", "1\n")
    assert maps.read_jobs(GPUS) == {"GPU-0": whole(SlurmJob("4711")), "GPU-1": whole(SlurmJob("12"), SlurmJob("13"))}


def test_jobs_of_mig_instances(tmp_path: Path) -> None:
    """A file of an instance, by its id or UUID, assigns the instance only; one of the GPU assigns the rest."""
    write(tmp_path / "map/0.0", "10\n")
    write(tmp_path / "map/0.7", "17\n")  # the driver does not list it
    write(tmp_path / "map/1", "20\n")
    write(tmp_path / "map/1.1", "21\n")
    write(tmp_path / "map/2.0", "30\n")
    write(tmp_path / "gpustat/MIG-0-2", "12 1000\n")
    found = SlurmJobMaps(tmp_path / "map", tmp_path / "gpustat").read_jobs([
        mig_gpu(0, free=[1, 1, 1]), mig_gpu(1, free=[1, 1]), gpu(2),
    ])  # fmt: skip
    assert found["GPU-0"] == GpuJobs(
        (SlurmJob("10"), SlurmJob("17"), SlurmJob("12", 1000)),
        (),
        {"MIG-0-0": (SlurmJob("10"),), "MIG-0-2": (SlurmJob("12", 1000),)},
    )
    assert found["GPU-1"] == GpuJobs(
        (SlurmJob("20"), SlurmJob("21")), (SlurmJob("20"),), {"MIG-1-1": (SlurmJob("21"),)}
    )
    assert found["GPU-2"] == GpuJobs((SlurmJob("30"),))
    on = [GpuProcess(1, "compute", None, instance) for instance in ("MIG-1-0", "MIG-1-1", None)]
    assert [found["GPU-1"].jobs_of(process) for process in on] == [
        (SlurmJob("20"),),
        (SlurmJob("21"),),
        (SlurmJob("20"),),
    ]


def test_gpustat_by_index_and_uuid(tmp_path: Path) -> None:
    """A file is named by the GPU's index or UUID, and has the job and its user; the UUID takes precedence."""
    maps = SlurmJobMaps(None, tmp_path)
    write(tmp_path / "0", "4711 1000\n")
    write(tmp_path / "1", "1 1\n")
    write(tmp_path / "GPU-1", "4712 1001\n")
    assert maps.read_jobs(GPUS) == {"GPU-0": whole(SlurmJob("4711", 1000)), "GPU-1": whole(SlurmJob("4712", 1001))}


def test_both_maps_agree(tmp_path: Path) -> None:
    """A job in both maps is one job, with its user."""
    write(tmp_path / "a/0", "4711\n")
    write(tmp_path / "b/0", "4711 1000\n")
    assert SlurmJobMaps(tmp_path / "a", tmp_path / "b").read_jobs(GPUS) == {"GPU-0": whole(SlurmJob("4711", 1000))}


def test_changes_are_detected(tmp_path: Path) -> None:
    """The current files count, also if overwritten, replaced, emptied or removed."""
    maps = SlurmJobMaps(tmp_path / "map", None)
    assert maps.read_jobs(GPUS) == {}
    write(tmp_path / "map/0", "1\n")
    assert maps.read_jobs(GPUS) == {"GPU-0": whole(SlurmJob("1"))}
    write(tmp_path / "map/0", "22\n")
    assert maps.read_jobs(GPUS) == {"GPU-0": whole(SlurmJob("22"))}
    (tmp_path / "new").write_text("33\n")
    (tmp_path / "new").replace(tmp_path / "map/0")
    assert maps.read_jobs(GPUS) == {"GPU-0": whole(SlurmJob("33"))}
    write(tmp_path / "map/0", "")
    assert maps.read_jobs(GPUS) == {}
    (tmp_path / "map/0").unlink()
    (tmp_path / "map").rmdir()
    assert maps.read_jobs(GPUS) == {}


def test_other_files_are_skipped(tmp_path: Path) -> None:
    """Everything except a map is skipped: pipes, folders, broken links, other text, endless files."""
    os.mkfifo(tmp_path / "0")
    (tmp_path / "1").mkdir()
    (tmp_path / "2").symlink_to(tmp_path / "nothing")
    assert SlurmJobMaps(tmp_path, tmp_path).read_jobs(GPUS) == {}
    (tmp_path / "0").unlink()
    (tmp_path / "0").write_bytes(b"\xff\xfe\n-\n" + "".join(f"job{n}\n" for n in range(10_000)).encode())
    (jobs,) = SlurmJobMaps(tmp_path, None).read_jobs(GPUS).values()
    assert len(jobs.all) <= MAX_JOBS
    assert jobs.all[0] == SlurmJob("job0")
    write(tmp_path / "0", '4711 "x"\n4712 ' + "9" * 100 + "\n" + "7" * 100 + " 1\n")
    assert SlurmJobMaps(None, tmp_path).read_jobs(GPUS) == {"GPU-0": whole(SlurmJob("4711"), SlurmJob("4712"))}
