"""CUDA libraries that the processes on the GPUs have loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_environment import compile_library

from gpuwarden.doctor.frameworks.job_checks import MAX_JOBS, check_jobs, read_loaded
from gpuwarden.doctor.model import CheckResult, Context
from snapshots import gpu, snapshot

# Lines of a TensorFlow 2.20 process with the packages of NVIDIA, shortened.
MAPS = """7f1c00000000-7f1c00021000 rw-p 00000000 00:00 0
7f1c10000000-7f1c12000000 r--p 00000000 fd:00 101 /env/site-packages/nvidia/cudnn/lib/libcudnn.so.9
7f1c12000000-7f1c12500000 r-xp 02000000 fd:00 101 /env/site-packages/nvidia/cudnn/lib/libcudnn.so.9
7f1c13000000-7f1c13500000 r-xp 00000000 fd:00 102 /env/site-packages/nvidia/cudnn/lib/libcudnn_ops.so.9
7f1c14000000-7f1c14500000 r-xp 00000000 fd:00 103 /env/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12
7f1c15000000-7f1c15500000 r-xp 00000000 fd:00 104 /usr/lib/x86_64-linux-gnu/libcuda.so.590.48.01
"""


def check(tmp_path: Path, *pids: int) -> list[CheckResult]:
    """Run the check on a machine with these processes on its GPU."""
    polled = snapshot(gpu(0, held=dict.fromkeys(pids, 1)))
    return list(check_jobs.check(Context(tmp_path, {}, tmp_path, survey=lambda: polled)))


def add_process(tmp_path: Path, pid: int, maps: str) -> None:
    """Lay out a process in /proc."""
    folder = tmp_path / f"proc/{pid}"
    folder.mkdir(parents=True)
    (folder / "maps").write_text(maps)
    (folder / "comm").write_text("python\n")


def test_the_libraries_of_a_process_are_shown(tmp_path: Path) -> None:
    """Each file once."""
    add_process(tmp_path, 4711, MAPS)
    (found,) = check(tmp_path, 4711)
    assert found.status == "pass"
    assert found.found.startswith(
        "Process 4711 (python) has loaded /env/site-packages/nvidia/cudnn/lib/libcudnn.so.9, "
    )
    assert found.found.count("libcudnn.so.9") == 1


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ("7f1-7f2 r-xp 00000000 fd:00 9 /usr/lib/x86_64-linux-gnu/libcudnn.so.8.9.7\n", "libcudnn.so.8.9.7"),
        ("7f1-7f2 r-xp 00000000 fd:00 9 /env/nvidia/cublas/lib/libcublas.so.12 (deleted)\n", "replaced since"),
    ],
)
def test_two_versions_and_a_replaced_file_are_warnings(tmp_path: Path, more: str, word: str) -> None:
    """A second cuDNN, and an upgrade under a running job."""
    add_process(tmp_path, 4711, MAPS + more)
    (found,) = check(tmp_path, 4711)
    assert found.status == "warn"
    assert word in found.found


def test_without_processes_or_their_maps_it_is_skipped(tmp_path: Path) -> None:
    """Those of another user cannot be read."""
    assert check(tmp_path)[0].found == "No process is on a GPU."
    (found,) = check(tmp_path, 1, 2)
    assert (found.status, found.found) == ("skip", "The libraries of 2 processes on the GPUs cannot be read.")


def test_many_processes_give_a_bounded_number_of_results(tmp_path: Path) -> None:
    """A box with MPS has many."""
    for pid in range(100, 200):
        add_process(tmp_path, pid, MAPS)
    assert len(check(tmp_path, *range(100, 200))) == MAX_JOBS


def test_the_maps_of_a_real_process(tmp_path: Path) -> None:
    """One that has loaded a library of that name."""
    library = compile_library(tmp_path / "libcudnn.so.9")
    program = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert read_loaded(Path("/proc"), process.pid) == {"libcudnn": {str(library): False}}
        library.unlink()
        assert read_loaded(Path("/proc"), process.pid) == {"libcudnn": {str(library): True}}
        process.communicate()
